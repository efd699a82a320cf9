"""The search for layers without a model: what it asks for, when it stops and is resumed, and what it stores."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.files import checkpoint_digest
from jaxspec.methods.swift import search as swift_search
from jaxspec.methods.swift.search import LayerSearch, SearchSettings, fit_upper_bound, propose_bayesian
from jaxspec.methods.swift.store import FORMAT, LayerStore
from jaxspec.models.layer_set import all_layers, count_skipped, from_skipped, num_units, uniform_layers

LAYERS = 16
UNIFORM = uniform_layers(LAYERS)


def chance(layers):
    """A model in which each skipped block costs, some much more than others."""
    cost = np.random.default_rng(1).gamma(0.6, 1.0, 2 * (LAYERS - 2))
    return float(np.exp(-1.5 * cost[layers.skipped].sum() / cost.sum()))


def draw(seed):
    rng = np.random.default_rng(seed)
    return lambda layers: rng.binomial(32, chance(layers))


def search_on(score, seed=0, **settings):
    """Run a search to its end; `score` gives the matches of a set, of 32."""
    search = LayerSearch(LAYERS, SearchSettings(**settings), seed=seed)
    while search.stopped is None:
        step(search, score)
    return search


def step(search, score):
    layers = search.propose()
    search.tell(layers, score(layers) / 32)
    return layers


def test_candidates_have_the_asked_for_size():
    search = LayerSearch(LAYERS, SearchSettings(ratio=0.45))
    asked = [search.propose() for _ in range(20)]
    assert search.layers == UNIFORM and len(set(asked)) == 20
    assert {layers.num_skipped for layers in asked} == {int(28 * 0.45)}


@pytest.mark.parametrize(
    ("score", "settings", "reason", "steps"),
    [
        (draw(0), {"steps": 40}, "40 steps", 40),
        (lambda layers: 10, {"tolerance": 30}, "30 steps without a better set", 31),
        (lambda layers: 0, {"tolerance": 30}, "30 steps without a better set", 30),
        (lambda layers: 32 if layers.attention[3] else 10, {}, "matchness above 0.95", None),
    ],
)
def test_why_it_stops(score, settings, reason, steps):
    search = search_on(score, **settings)
    assert search.stopped == reason and steps in (None, search.steps)
    assert reason[0] != "m" or search.layers.attention[3]
    before = search.save()
    search.tell(UNIFORM, 1.0)
    assert search.save() == before, "a score that arrives after the end"


@pytest.mark.parametrize(("layers", "ratio"), [(2, 0.5), (1, 0.5), (8, 0.0), (8, 0.05)])
def test_nothing_to_choose(layers, ratio):
    search = LayerSearch(layers, SearchSettings(ratio=ratio))
    assert search.stopped == "there is nothing to choose" and search.layers == all_layers(layers)


def test_a_better_score_decides_at_once_and_for_good():
    search = LayerSearch(LAYERS, SearchSettings(tolerance=5))
    scores = [7, 7, 6, 20, 20, 3, 31]
    for number, matches in enumerate(scores, 1):
        layers = step(search, lambda _, matches=matches: matches)
        assert search.steps == number
        assert (search.layers == layers) == (number in (1, 4, 7))
    assert search.history == [(1, 7 / 32), (4, 20 / 32), (7, 31 / 32)]
    assert search.stopped == "matchness above 0.95"


def test_the_upper_bound_is_that_of_a_gaussian_process():
    """Against the textbook formula: posterior mean and variance by the inverse of the kernel matrix."""
    rng = np.random.default_rng(0)
    known, asked = rng.random((20, 12)) < 0.5, rng.random((7, 12)) < 0.5
    scores, noise = rng.random(20), 0.3

    def kernel(a, b):
        distance = np.sqrt(((a[:, None].astype(float) - b[None]) ** 2).sum(-1)) / np.sqrt(12)
        return (1 + np.sqrt(5) * distance + 5 * distance**2 / 3) * np.exp(-np.sqrt(5) * distance)

    inverse = np.linalg.inv(kernel(known, known) + noise * np.eye(20))
    mean = scores.mean() + kernel(asked, known) @ inverse @ (scores - scores.mean())
    variance = 1 - np.einsum("ij,jk,ik->i", kernel(asked, known), inverse, kernel(asked, known))
    expected = mean + 2.5 * np.sqrt(variance) * scores.std()
    np.testing.assert_allclose(fit_upper_bound(known, scores, noise)(asked), expected, rtol=1e-9)
    # Scores that are all the same say nothing about where to look, and divide nothing by zero.
    assert np.isfinite(fit_upper_bound(known, np.full(20, 0.5), noise)(asked)).all()


def evaluations_until_optimum(interval, seed, layers=6, size=4, most=70):
    """Sets scored before the planted best of all 70 sets: four of eight blocks, each of which costs otherwise."""
    optimum = np.random.default_rng(1000 + seed).permutation(num_units(layers)) < size
    settings = SearchSettings(
        ratio=size / num_units(layers), interval=interval, tolerance=10**6, steps=10**6, max_score=1
    )
    assert count_skipped(layers, settings.ratio) == size
    search, seen = LayerSearch(layers, settings, seed=seed), set()
    while from_skipped(layers, optimum) not in seen and len(seen) < most:
        seen.add(step(search, lambda each: 30 - 6 * int((each.skipped & ~optimum).sum())))
    return len(seen)


def test_bayesian_proposals_find_a_planted_optimum_sooner_than_random_ones():
    bayesian = [evaluations_until_optimum(2, seed) for seed in range(12)]
    random = [evaluations_until_optimum(10**6, seed) for seed in range(12)]
    assert np.mean(bayesian) < 0.6 * np.mean(random)


def test_bayesian_proposals_follow_the_scores():
    """Skipping the first half of the blocks costs nothing, the second half much."""
    rng = np.random.default_rng(0)
    sets = [rng.permutation(np.arange(20) < 8) for _ in range(60)]
    observed = [(skipped, 1 - 0.1 * float(skipped[10:].sum())) for skipped in sets]
    # One of another size is no candidate.
    for more in ([], [observed[0]] * 60, [(np.ones(20, bool), 0.2)]):
        proposed = propose_bayesian([*observed, *more], 8, np.random.default_rng(3))
        assert proposed.sum() == 8 and proposed[10:].sum() <= 1


def test_every_so_many_proposals_one_is_bayesian_over_all_processes(monkeypatch):
    asked_for, saved = [], None

    def propose(observed, size, rng):
        asked_for.append(len(observed))
        return UNIFORM.skipped

    monkeypatch.setattr(swift_search, "propose_bayesian", propose)
    for _ in range(5):
        search = LayerSearch(LAYERS, SearchSettings(interval=10))
        if saved is not None:
            search.load(saved)
        for _ in range(6):
            step(search, lambda _: 5)
        saved = json.loads(json.dumps(search.save()))
    assert search.steps == 30 and asked_for == [9, 19, 29]


def test_short_processes_share_a_budget_and_what_is_known(tmp_path):
    """One score each: together they come as far as one that goes on."""
    file, score, asked = LayerStore(tmp_path / "sets.json", "m"), draw(0), set()
    for number in range(40):
        search = LayerSearch(LAYERS, SearchSettings(interval=10**6, tolerance=10**6, max_score=1.0))
        file.load("default", search)
        assert search.decoded_s == pytest.approx(2.5 * number) and search.spent_s == pytest.approx(0.05 * number)
        search.decoded_s += 2.5
        search.spent_s += 0.05
        asked.add(step(search, score))
        file.save("default", search)
    assert search.steps == len(asked) == 40 and chance(search.layers) > chance(UNIFORM)


def test_another_process_goes_on(tmp_path):
    file = LayerStore(tmp_path / "new" / "sets.json", "model a", "a")
    search = search_on(draw(0), steps=30, tolerance=10**6)
    file.save("poems", search)
    file.save("code", search_on(draw(1), steps=20))
    LayerStore(file.path, "model b").save("poems", search_on(draw(2), steps=10))
    same, more = (LayerSearch(LAYERS, dataclasses.replace(search.settings, steps=n)) for n in (30, 60))
    for again in (same, more):
        file.load("poems", again)
        assert (again.layers, again.matchness) == (search.layers, search.matchness)
    assert (same.steps, same.stopped, same.history) == (search.steps, search.stopped, search.history)
    assert same.save() == search.save()
    assert more.stopped is None and more.steps == 0
    other = LayerSearch(LAYERS, SearchSettings(ratio=0.2))
    file.load("poems", other)
    assert other.layers == UNIFORM
    # An entry of fewer steps does not displace one of more, whatever its settings, unless it is told to.
    for settings in (search.settings, SearchSettings(tolerance=7)):
        shorter = LayerSearch(LAYERS, settings)
        shorter.steps = 5
        file.save("poems", shorter)
        file.load("poems", same)
        assert same.steps == search.steps
    file.save("poems", shorter, replace=True)
    assert sorted((entry["digest"], entry["task"], entry["search"]["steps"]) for entry in file.read()) == [
        ("model a", "code", 20), ("model a", "poems", 5), ("model b", "poems", 10),
    ]  # fmt: skip


def saved_as(**entry):
    entry = {"digest": "m", "model": "x", "task": "default", "ratio": "0.45"} | entry
    return json.dumps({"format": FORMAT, "sets": [entry]})


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": "other", "sets": []}', json.dumps({"format": FORMAT}), "\x00\xff", "[" * 100_000,
        json.dumps({"format": FORMAT, "sets": [3]}), saved_as(), saved_as(search=7), saved_as(search={"steps": "3"}),
        saved_as(task=None, search={"steps": 3}),
        *(
            saved_as(search=LayerSearch(LAYERS, SearchSettings()).save() | damage)
            for damage in ({"layers": "mlp=99"}, {"steps": math.inf}, {"spent_s": 10**400}, {"decoded_s": math.nan})
        ),
    ],
)  # fmt: skip
def test_files_of_another_kind(tmp_path, content, caplog):
    """An error where the user named the file; in the cache a warning, and a new file in the end."""
    path = tmp_path / "sets.json"
    path.write_text(content, encoding="latin-1")
    search = LayerSearch(LAYERS, SearchSettings())
    with pytest.raises(ConfigError, match="layer sets"):
        LayerStore(path, "m", "x", strict=True).load("default", search)
    assert path.read_text(encoding="latin-1") == content
    file = LayerStore(path, "m", "x")
    file.check()
    file.load("default", search)
    assert search.layers == UNIFORM and "is not used" in caplog.text
    found = search_on(draw(0), steps=5)
    file.save("default", found)
    file.load("default", search)
    assert search.layers == found.layers and [*tmp_path.iterdir()] == [path]


def test_a_file_of_another_model(tmp_path):
    path = tmp_path / "sets.json"
    LayerStore(path, "a", "llama-7b").save("default", search_on(draw(0), steps=5))
    with pytest.raises(ConfigError, match="another model .llama-7b., not of mistral: name another file"):
        LayerStore(path, "b", "mistral", strict=True).check()
    LayerStore(path, "a", "renamed", strict=True).check()
    # The file in the cache is for all models.
    LayerStore(path, "b", "mistral").check()


def test_a_file_that_can_only_be_read(tmp_path, monkeypatch, caplog):
    """It is used; that findings are not stored is a warning. Its permissions stay as they were."""
    with pytest.raises(ConfigError, match="a folder that exists"):
        LayerStore(tmp_path / "no" / "sets.json", "m", strict=True).check()
    file = LayerStore(tmp_path / "sets.json", "m", strict=True)
    file.check()
    file.save("default", search_on(draw(0), steps=5))
    file.path.chmod(0o664)
    file.save("default", search_on(draw(0), steps=9))
    assert file.path.stat().st_mode & 0o777 == 0o664
    monkeypatch.setattr("os.access", lambda path, mode: False)

    def refuse(path, content):
        raise PermissionError("read-only")

    monkeypatch.setattr("jaxspec.methods.swift.store.write_whole", refuse)
    file.check()
    file.save("default", search_on(draw(0), steps=50))
    assert "read-only" in caplog.text
    with pytest.raises(ConfigError, match="a folder that exists"):
        LayerStore(tmp_path / "other.json", "m", strict=True).check()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, caplog):
    path = tmp_path / "sets.json"
    file = LayerStore(path, "m", strict=True)
    file.save("default", search_on(draw(0), steps=5))
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    file.save("default", search_on(draw(0), steps=50))
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]
    path.write_text("now it is something else")
    file.save("default", search_on(draw(0), steps=50))
    assert caplog.text.count("cannot be written") == 2


def test_the_digest_is_that_of_the_contents(tmp_path):
    """Equal copies share it; one changed number in a small tensor in the middle of a large file does not."""
    cfg: Any = "a geometry"  # of which the digest takes the representation
    sizes = {"first": 5_000_000, "norm": 64, "last": 5_000_000}
    ends = np.cumsum([*sizes.values()]).tolist()
    spans = {name: [end - size, end] for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def write(folder, name, change=None, names=tuple(sizes)):
        index = {
            new: {"dtype": "U8", "shape": [sizes[old]], "data_offsets": spans[old]}
            for new, old in zip(names, sizes, strict=True)
        }
        raw = json.dumps({"__metadata__": {}} | index).encode()
        data = bytearray(ends[-1])
        if change is not None:
            data[change] = 1
        place = tmp_path / name / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        if "." in name:
            (place / "notes.txt").write_text(folder)
        return checkpoint_digest(place, cfg)

    for name in ("model.safetensors", "model.gguf", "shard"):
        same = write("a", name)
        assert same == write("b", name)
        changed = [write("c", name, change) for change in (0, spans["norm"][0] + 9, ends[-1] - 1)]
        renamed = write("d", name, names=("first", "mean", "last"))
        assert len({same, renamed, *changed}) == 5
    file = tmp_path / "shard" / "a" / "shard"
    other: Any = "another geometry"
    assert checkpoint_digest(file, cfg) != checkpoint_digest(file, other)
