"""`jaxspec-bench`: its options on invented methods, one real run, and what --help loads."""

import json
import signal

import bench_fakes
import pytest
from mtp_folders import FAMILIES, write_mtp
from native_models import without_kernel_note, write_tokenizer

from jaxspec.cli import bench


@pytest.fixture
def call(monkeypatch, command):
    """Run the command in this process on invented methods."""
    bench_fakes.install(monkeypatch)
    monkeypatch.setattr("jaxspec.llm.LLM", bench_fakes.FakeLLM)
    monkeypatch.setattr("jaxspec.loading.has_draft", lambda model, draft, revision: draft is not None)
    return lambda *words: command("bench", *words)


def test_tables_go_to_stdout_and_the_object_to_a_file(call, tmp_path):
    words = [
        "--draft-model", "d", "--methods", "specexec,lookup", "--budgets", "2,4", "--set", "specexec.width=9",
        "--set", "specexec.shape=[3, 1]", "--set", "specexec.decay=1", "--set", "specexec.limit=7",
        "--categories", "chat,code", "--max-prompts", "4", "-n", "30", "--repeats", "2",
        "--json", f"{tmp_path}/out.json",
    ]  # fmt: skip
    status, out, err = call(*words)
    assert (status, err) == (0, "")
    assert "specexec[num_draft_tokens=4]" in out and "speed-up" in out and "--budgets 2,4" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [column["label"] for column in report["columns"]] == [
        "ar",
        "specexec[num_draft_tokens=2]",
        "specexec[num_draft_tokens=4]",
        "lookup",
    ]
    assert report["columns"][1]["settings"] == {
        "num_draft_tokens": 2,
        "width": 9,
        "shape": [3, 1],
        "decay": 1,
        "limit": 7,
    }
    assert list(report["categories"]) == ["chat", "code"] and report["overall"]["prompts"] == 4
    assert len(report["samples"]) == 4 * 4 * 2
    assert report["command"].startswith("jaxspec-bench --draft-model d") and report["draft"] == "d"
    assert report["sampling"]["max_tokens"] == 30 and report["sampling"]["ignore_eos"] is False


def test_the_object_can_be_all_of_stdout(call):
    status, out, err = call(
        "--methods", "ar", "--max-prompts", "2", "--ignore-eos", "--temp", "0.5", "--seed", "3", "--json", "-"
    )
    assert status == 0
    report = json.loads(out)
    assert (report["sampling"]["temperature"], report["sampling"]["seed"]) == (0.5, 3)
    assert "temperature 0.5" in err and "end-of-sequence tokens ignored" in err


def test_all_methods_that_fit_by_default(call):
    for words, labels in [([], ["ar", "lookup"]), (["--draft-model", "d"], list(bench_fakes.METHODS))]:
        status, out, _ = call("--max-prompts", "1", "--repeats", "1", "-n", "20", "--json", "-", *words)
        assert status == 0
        assert [column["label"] for column in json.loads(out)["columns"]] == labels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "specexek"], "did you mean 'specexec'"),
        (["--methods", "specexec", "--draft-model", "d", "--draft-platform", "cpu"], "specexec cannot use them"),
        (["--methods", "ar,,lookup"], "--methods 'ar,,lookup' must be names with commas between them"),
        (["--categories", "math"], "no prompt is of category 'math'; did you mean 'maths'"),
        (["--budgets", "1,many"], "--budgets '1,many' must be whole numbers"),
        (["--set", "width=3"], "must have the form method.name=value"),
        (["--set", "specexec.widht=3"], "did you mean 'width'"),
        (["--set", "specexec.width=wide"], "width must be of type int, got 'wide'"),
        (["--set", "ar.width=3"], "unknown option 'width'; known: steps_per_dispatch"),
        (["--methods", "lookup", "--set", "lookup.width=3"], "method 'lookup' has no settings"),
        (["--json", "no/such/folder/out.json"], "it must be a file in a folder that exists"),
    ],
)
def test_wrong_words_exit_with_2_and_one_line(call, arguments, message):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_an_interrupt_keeps_rows_and_exits_with_130(call, monkeypatch, tmp_path, capsys):
    """The signal comes while the third answer is given; the report holds the two that were complete."""
    left = []
    chat = bench_fakes.FakeLLM.chat

    def interrupted(self, messages, sampling):
        if sampling.max_tokens == 20 and not left:
            if self.calls and sum(call[2].max_tokens == 20 for call in self.calls) == 2:
                left.append(signal.raise_signal(signal.SIGINT))
        return chat(self, messages, sampling)

    def leave():
        raise SystemExit(130)

    monkeypatch.setattr(bench_fakes.FakeLLM, "chat", interrupted)
    monkeypatch.setattr(bench, "leave_after_interrupt", leave)
    words = ("--methods", "lookup", "--categories", "chat", "-n", "20", "--json", f"{tmp_path}/out.json")
    status, out, _ = call(*words)
    assert status == 130 and "interrupted: the numbers are of the 2 answers that were complete" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["interrupted"] and len(report["samples"]) == 2


def test_the_glossary_is_shown_on_request(call):
    words = ("--methods", "ar", "--max-prompts", "1", "--repeats", "1", "-n", "20")
    assert "bootstrap" not in call(*words)[1] and "bootstrap" in call(*words, "--glossary")[1]


@pytest.mark.thorough
def test_a_mixture_with_a_draft_that_is_fed_states(command, tmp_path):
    """Passes of both are timed, and the roofline is that of one row's experts."""
    folder = write_mtp(tmp_path / "model", "experts")
    write_tokenizer(folder, FAMILIES["experts"].vocab_size)
    words = ["--model", folder, "--methods", "chain", "--max-prompts", "1", "--repeats", "1", "-n", "12"]
    done = command("bench", *words, "--ignore-eos", "--json", f"{tmp_path}/out.json")
    assert done.status == 0 and "roofline" in done.out
    report = json.loads((tmp_path / "out.json").read_text())
    times = report["columns"][1]["pass_s"]
    assert times["draft_s"] > 0 and times["draft_root_s"] > 0 and report["roofline"]["gb_per_s"] > 0
    assert report["overall"]["columns"]["chain"]["exact"]["equal"] == 1


@pytest.mark.real_model
@pytest.mark.thorough
def test_plain_decoding_of_the_default_model(command, tmp_path):
    words = ["--methods", "ar", "--max-prompts", "1", "--repeats", "1", "-n", "12", "--json", f"{tmp_path}/out.json"]
    done = command("bench", *words)
    assert (done.status, without_kernel_note(done.err)) == (0, "")
    report = json.loads((tmp_path / "out.json").read_text())
    row = report["overall"]["columns"]["ar"]
    assert row["acceptance_length"] == 1 and row["speedup"]["mean"] == 1
    # Beside other work a sample of the roofline may be slower than the step that it bounds.
    assert row["gb_per_s"] > 0 and report["roofline"]["gb_per_s"] > 0
    assert row["of_roofline"] == pytest.approx(row["gb_per_s"] / report["roofline"]["gb_per_s"])
    assert report["columns"][0]["pass_s"]["target_s"]["1"] > 0 and report["answers_that_compiled"] == 0
