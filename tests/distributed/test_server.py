"""The server in two processes: process 0 answers, and both run every request, to its end or its abort."""

import signal

import openai
import pytest
from process_harness import Commands

import jaxspec

PROMPT = "w3 w4 w5 w6 w3 w4 w5"
LONG = {"ignore_eos": True, "max_tokens": 240}


@pytest.fixture(scope="module")
def expected(pair):
    """The text that one process decodes."""
    llm = jaxspec.LLM(pair[0], method="ar", max_context=256)
    return llm.generate(PROMPT, jaxspec.SamplingParams(max_tokens=24, ignore_eos=True))


@pytest.mark.thorough
def test_a_client_talks_to_two_processes(pair, expected, tmp_path):
    words = ["serve", "--model", pair[0], "--draft-model", pair[1], "--method", "chain", "--port", "0"]
    words += ["--max-context", "256"]
    with Commands(tmp_path, words, words) as server:
        url = server.await_line("live view at").split()[-1]
        with openai.OpenAI(base_url=f"{url}v1", api_key="any", max_retries=0, timeout=120) as client:

            def ask():
                return client.completions.create(
                    model="target", prompt=PROMPT, max_tokens=24, extra_body={"ignore_eos": True}
                )

            assert ask().choices[0].text == expected.text
            asked = len(server.log(0))
            with client.completions.create(model="target", prompt=PROMPT, stream=True, extra_body=LONG) as stream:
                next(iter(stream))
            server.await_log("close", after=asked, limit_s=30)
            aborted = len(server.log(0))
            assert ask().choices[0].text == expected.text
        for process in server.processes:
            process.send_signal(signal.SIGTERM)
        assert server.await_end()[0] == [0, 0], server.error(0) + server.error(1)
    leads, follows = server.log(0), server.log(1)
    assert leads == follows
    # The abort is a close after a few rounds, in both.
    rounds = [line for line in follows[asked:aborted] if line.startswith("step")]
    assert 1 <= len(rounds) < 100
    assert follows[aborted - 1].startswith("close") and follows[-1].startswith("close")
    assert len([line for line in follows if line.startswith("close")]) == 3
