"""The search for layers on its own: what it asks for, when it stops, what it keeps."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from swift_cases import models_of

from jaxspec.errors import ConfigError
from jaxspec.methods.swift import search as swift_search
from jaxspec.methods.swift.bayes import propose_bayesian
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swift.store import FORMAT, LayerStore, model_digest
from jaxspec.models.layer_set import all_layers, uniform_layers

LAYERS = 16


def chance(layers):
    """A model in which each skipped block costs, some much more than others."""
    cost = np.random.default_rng(1).gamma(0.6, 1.0, 2 * (LAYERS - 2))
    return float(np.exp(-1.5 * cost[layers.skipped].sum() / cost.sum()))


def search_on(score, seed=0, layers=LAYERS, **settings):
    """Run a search to its end; `score` gives the matches of a set on a window."""
    search = LayerSearch(layers, SearchSettings(**settings), seed=seed)
    window = 0
    while search.stopped is None:
        if search.window_is_used_up or not window:
            window += 1
            search.open_window()
        asked = search.next_sets(3)
        search.tell(asked, [score(each, window) for each in asked.layers])
    return search


def draw(seed):
    rng = np.random.default_rng(seed)
    return lambda layers, window: rng.binomial(32, chance(layers))


def test_candidates_have_the_asked_for_size():
    search = LayerSearch(LAYERS, SearchSettings(ratio=0.45))
    search.open_window()
    asked = search.next_sets(20)
    assert asked.layers[0] == uniform_layers(LAYERS)
    assert {layers.num_skipped for layers in asked.layers[1:]} == {int(28 * 0.45)}
    assert len(set(asked.layers)) == 20


def test_it_stops_after_its_steps():
    search = search_on(draw(0), steps=40)
    assert search.stopped == "40 steps" and 40 <= search.steps < 43


def test_it_stops_without_progress():
    search = search_on(lambda layers, window: 10, tolerance=30)
    assert search.stopped == "30 steps without a better set"
    assert search.incumbent.layers == uniform_layers(LAYERS) and search.adopted == [(0, str(uniform_layers(LAYERS)))]


def test_it_stops_at_a_good_set_that_is_confirmed():
    search = search_on(lambda layers, window: 32 if layers.attention[3] else 10)
    assert search.stopped == "matchness above 0.95" and search.incumbent.tokens >= 64
    assert search.incumbent.layers.attention[3]


def test_a_lucky_score_does_not_stay():
    """The second candidate has 32 of 32 once, and 5 from then on; what it displaced comes back."""
    seen = []

    def score(layers, window):
        if layers == uniform_layers(LAYERS):
            return 15
        if layers not in seen:
            seen.append(layers)
        return 32 if layers == seen[1 % len(seen)] and window == 1 and len(seen) == 2 else 5

    search = search_on(score, steps=60)
    assert search.incumbent.layers == uniform_layers(LAYERS)
    assert [layers for _, layers in search.adopted] == [
        str(uniform_layers(LAYERS)), str(seen[1]), str(uniform_layers(LAYERS)),
    ]  # fmt: skip


def test_what_is_known_of_a_set_outweighs_one_window():
    """A score that is a little better, once, does not displace an incumbent of many windows; several do."""
    search = LayerSearch(LAYERS, SearchSettings(tolerance=10**6))
    for _ in range(10):
        search.open_window()
        search.tell(search.next_sets(4), [16, 4, 4, 4])
    rival = search.next_sets(1)
    search.tell(rival, [20])
    assert search.incumbent.layers == uniform_layers(LAYERS)
    for _ in range(10):
        search.open_window()
        asked = search.next_sets(2)
        assert asked.layers == [uniform_layers(LAYERS), *rival.layers]
        search.tell(asked, [16, 20])
        if search.incumbent.layers == rival.layers[0]:
            break
    assert search.incumbent.layers == rival.layers[0] and search.incumbent.tokens >= 64


def test_as_many_rivals_as_can_be_scored_again():
    search = LayerSearch(LAYERS, SearchSettings())
    search.open_window()
    search.tell(search.next_sets(7), [3, 4, 8, 6, 5, 9, 7])
    assert search.incumbent.matches == 9
    assert [standing.matches for standing in search._rivals] == [8, 4, 3]
    search.open_window()
    assert [standing is not None for _, standing in search.next_sets(5).sets] == [True] * 4 + [False]


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_short_texts_have_candidates_scored_too(passes):
    """So few scores a window that the incumbent and its rivals alone would take them all."""
    search = LayerSearch(LAYERS, SearchSettings(steps=200, tolerance=10**6, max_score=1.0))
    score, windows, again = draw(0), 0, {}
    while search.stopped is None:
        windows += 1
        search.open_window()
        for _ in range(passes):
            asked = search.next_sets(1)
            [(layers, standing)] = asked.sets
            if standing is not None:
                again[layers] = again.get(layers, 0) + 1
            search.tell(asked, [score(layers, windows)])
    assert search.steps >= windows * passes / 2 - 2
    # Whoever stayed was scored again and again, and what was found is good.
    assert again[search.incumbent.layers] >= 10
    assert chance(search.incumbent.layers) > chance(uniform_layers(LAYERS))


def test_proposals_wait_until_they_can_be_afforded(monkeypatch):
    """The first one imports packages, later ones cost what the last one did; none is forgotten."""
    monkeypatch.setattr(swift_search, "propose_bayesian", lambda observed, best, count, seed: (best, 0.25))
    search = LayerSearch(LAYERS, SearchSettings(interval=4, tolerance=10**6))
    search.open_window()
    for spare_s, affordable in ((0.1, False), (1.4, False), (1.6, True), (0.2, False), (0.3, True)):
        before, steps = search._num_bayesian, search.steps
        while search.steps < steps + 12:
            search.tell(search.next_sets(1, spare_s), [5])
        assert search._num_bayesian == (search._proposed // 4 if affordable else before)
    assert search.spent_s == 0.25 * search._num_bayesian


def test_short_processes_share_a_budget_and_what_is_known(tmp_path):
    """One score each: together they come as far as one that goes on."""
    file, score = LayerStore(tmp_path / "sets.json", "m"), draw(0)
    for number in range(60):
        search = LayerSearch(LAYERS, SearchSettings(interval=10**6, tolerance=10**6, max_score=1.0))
        file.load("default", search)
        assert search.decoded_s == pytest.approx(2.5 * number) and search.spent_s == pytest.approx(0.05 * number)
        search.decoded_s += 2.5
        search.spent_s += 0.05
        search.open_window()
        asked = search.next_sets(1)
        search.tell(asked, [score(asked.layers[0], number)])
        file.save("default", search)
    assert search.steps >= 28 and search._rivals and search.incumbent.tokens >= 5 * 32


def test_proposals_that_fail_are_random_ones(monkeypatch, caplog):
    """A package that changed must not end a text."""

    def fail(*arguments):
        raise TypeError("no such argument")

    monkeypatch.setattr(swift_search, "propose_bayesian", fail)
    with ThreadPoolExecutor(1) as pool:
        for executor in (None, pool):
            caplog.clear()
            search = LayerSearch(LAYERS, SearchSettings(interval=3), executor)
            search.open_window()
            while search.steps < 30:
                asked = search.next_sets(1)
                search.tell(asked, [5])
                pool.submit(int).result()
            assert caplog.text.count("at random from here on: no such argument") == 1


def test_every_so_many_proposals_one_is_bayesian_over_all_processes(monkeypatch):
    """Short processes, a few steps each, come to it too."""
    asked_for = []

    def propose(observed, best, count, seed):
        asked_for.append(len(observed))
        return best, 0.0

    monkeypatch.setattr(swift_search, "propose_bayesian", propose)
    saved = None
    for _ in range(5):
        search = LayerSearch(LAYERS, SearchSettings(interval=10))
        if saved is not None:
            search.load(saved)
        search.open_window()
        steps = search.steps
        while search.steps < steps + 6:
            asked = search.next_sets(1)
            search.tell(asked, [5])
        saved = json.loads(json.dumps(search.save()))
    assert search.steps == 30 and len(asked_for) == 3


def test_answers_of_an_older_window_are_ignored():
    search = LayerSearch(LAYERS, SearchSettings())
    search.open_window()
    asked = search.next_sets(3)
    search.open_window()
    search.tell(asked, [1, 32, 32])
    assert search.steps == 0 and search.incumbent.tokens == 0


@pytest.mark.parametrize(("layers", "ratio"), [(2, 0.5), (1, 0.5), (8, 0.0), (8, 0.05)])
def test_nothing_to_choose(layers, ratio):
    search = LayerSearch(layers, SearchSettings(ratio=ratio))
    assert search.stopped == "there is nothing to choose" and search.incumbent.layers == all_layers(layers)


def test_the_search_beats_the_uniform_start_and_random_sets():
    found, random = [], []
    for seed in range(3):
        found.append(chance(search_on(draw(seed), seed, steps=100, interval=25).incumbent.layers))
        random.append(chance(search_on(draw(seed), seed, steps=100, interval=10**6).incumbent.layers))
    assert np.median(found) > np.median(random) > chance(uniform_layers(LAYERS))


def test_bayesian_proposals_follow_what_was_seen():
    """Skipping the first half of the units costs nothing, the second half much."""
    rng = np.random.default_rng(0)
    sets = [rng.permutation(np.arange(20) < 8) for _ in range(60)]
    observed = [(skipped, 1 - 0.1 * float(skipped[10:].sum())) for skipped in sets]
    proposed, seconds = propose_bayesian(observed, sets[0], 8, 3)
    assert proposed.sum() == 8 and proposed[10:].sum() <= 1 and seconds > 0
    # A set that is known a hundred times over counts once; the incumbent may be of another size.
    proposed, _ = propose_bayesian([*observed, *[observed[0]] * 100], np.ones(20, bool), 8, 3)
    assert proposed.sum() == 8


def test_another_process_goes_on(tmp_path):
    file = LayerStore(tmp_path / "new" / "sets.json", "model a")
    search = search_on(draw(0), steps=30, tolerance=10**6)
    file.save("poems", search)
    file.save("code", search_on(draw(1), steps=20))
    LayerStore(file.path, "model b").save("poems", search_on(draw(2), steps=10))
    again = LayerSearch(LAYERS, SearchSettings(steps=60, tolerance=10**6))
    file.load("poems", again)
    assert again.incumbent.layers == search.incumbent.layers and again.stopped is None
    same = LayerSearch(LAYERS, search.settings)
    file.load("poems", same)
    assert (same.steps, same.stopped, same.history) == (search.steps, search.stopped, search.history)
    assert same.incumbent == search.incumbent or same.incumbent.matchness == search.incumbent.matchness
    other = LayerSearch(LAYERS, SearchSettings(ratio=0.2))
    file.load("poems", other)
    assert other.incumbent.layers == uniform_layers(LAYERS)
    # Less than is known already is not kept, whatever its settings.
    for settings in (search.settings, SearchSettings(tolerance=7)):
        shorter = LayerSearch(LAYERS, settings)
        file.save("poems", shorter)
        shorter.steps = 5
        file.save("poems", shorter)
        file.load("poems", same)
        assert same.steps == search.steps


def saved_as(models):
    return json.dumps({"format": FORMAT, "models": models})


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": "other", "models": {}}', '{"format": "jaxspec layer sets 3"}', "\x00\xff",
        "[" * 100_000, saved_as([]), saved_as({"m": 3}), saved_as({"m": {"tasks": {}}}),
        saved_as({"m": {"model": "x", "tasks": {"default": 7}}}),
        saved_as({"m": {"model": "x", "tasks": {"default": {"0.45": 7}}}}),
        saved_as({"m": {"model": "x", "tasks": {"default": {"0.45": {"steps": "3"}}}}}),
        saved_as({"m": {"model": "x", "tasks": {"default": {"0.45": {"steps": 3, "layers": "mlp=99"}}}}}),
    ],
)  # fmt: skip
def test_files_that_are_none_of_ours(tmp_path, content, caplog):
    """An error where somebody named the file; a warning, and a new file in the end, where it lies in the cache."""
    path = tmp_path / "sets.json"
    path.write_text(content, encoding="latin-1")
    named = Swift()
    with pytest.raises(ConfigError, match="layer sets"):
        named.keep_in(LayerStore(path, "m", "x", strict=True))
        named.search(models_of("llama"))
    assert path.read_text(encoding="latin-1") == content
    search = LayerSearch(LAYERS, SearchSettings())
    file = LayerStore(path, "m", "x")
    file.check()
    file.load("default", search)
    assert search.incumbent.layers == uniform_layers(LAYERS) and "is not used" in caplog.text
    found = search_on(draw(0), steps=5)
    file.save("default", found)
    file.load("default", search)
    assert search.incumbent.layers == found.incumbent.layers and [*tmp_path.iterdir()] == [path]


def test_a_file_of_another_model(tmp_path):
    path = tmp_path / "sets.json"
    LayerStore(path, "a", "llama-7b").save("default", search_on(draw(0), steps=5))
    with pytest.raises(ConfigError, match="another model .llama-7b., not of mistral: name another file"):
        LayerStore(path, "b", "mistral", strict=True).check()
    LayerStore(path, "a", "renamed", strict=True).check()
    # The one in the cache is for all of them.
    LayerStore(path, "b", "mistral").check()
    LayerStore(path, "b", "mistral").save("default", search_on(draw(0), steps=5))
    assert set(LayerStore(path, "a").read()) == {"a", "b"}


def test_ratios_do_not_displace_each_other(tmp_path):
    file = LayerStore(tmp_path / "sets.json", "m")
    for ratio in (0.2, 0.45):
        file.save("default", search_on(draw(0), steps=9, ratio=ratio))
    for ratio in (0.2, 0.45):
        search = LayerSearch(LAYERS, SearchSettings(ratio=ratio))
        file.load("default", search)
        assert search.incumbent.matchness is not None and len(search.adopted) == 1
    # What a tool searched anew takes the place of what was known.
    anew = search_on(draw(1), steps=3)
    file.save("default", anew, replace=True)
    assert file.read()["m"]["tasks"]["default"]["0.45"]["steps"] == anew.steps < 9


def test_a_named_file_needs_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="a folder that exists"):
        LayerStore(tmp_path / "no" / "sets.json", "m", strict=True).check()
    LayerStore(tmp_path / "sets.json", "m", strict=True).check()


def test_a_file_that_can_only_be_read(tmp_path, monkeypatch, caplog):
    """It serves; what is found is not kept, and that is said. Who may write it stays as it was."""
    file = LayerStore(tmp_path / "sets.json", "m", strict=True)
    file.save("default", search_on(draw(0), steps=5))
    file.path.chmod(0o664)
    file.save("default", search_on(draw(0), steps=9))
    assert file.path.stat().st_mode & 0o777 == 0o664
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.mkstemp", lambda **settings: (_ for _ in ()).throw(PermissionError("read-only")))
    file.check()
    again = LayerSearch(LAYERS, SearchSettings())
    file.load("default", again)
    assert again.incumbent.matchness is not None
    file.save("default", search_on(draw(0), steps=50))
    assert "read-only" in caplog.text
    with pytest.raises(ConfigError, match="a folder that exists"):
        LayerStore(tmp_path / "other.json", "m", strict=True).check()


def test_a_text_is_not_lost_where_its_sets_cannot_be_kept(tmp_path, monkeypatch, caplog):
    """Whole or not at all, and never an error in the end."""
    path = tmp_path / "sets.json"
    file = LayerStore(path, "m", strict=True)
    file.save("default", search_on(draw(0), steps=5))
    before = path.read_text()

    def fail(*paths):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    file.save("default", search_on(draw(0), steps=50))
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]
    path.write_text("now it is something else")
    file.save("default", search_on(draw(0), steps=50))
    assert caplog.text.count("cannot be written") == 2


def test_the_digest_is_the_contents(tmp_path):
    from tiny_models import FAMILIES

    cfg = FAMILIES["llama"]
    for name, weights in (("a", b"1" * 100_000), ("b", b"1" * 100_000), ("c", b"1" * 99_999 + b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(weights)
    a, b, c = (model_digest(tmp_path / name, cfg) for name in "abc")
    assert a == b != c
    assert model_digest(tmp_path / "a" / "weights", cfg) == a
    assert model_digest(tmp_path / "a", FAMILIES["qwen2"]) != a
