"""The live view in a headless Chromium, where there is one: it streams, fits any screen, and asks one server alone."""

import base64
import json
import time

import pytest
from chromium import PROGRAM, SHIFT, Chromium
from serving import Running

import jaxspec
from jaxspec.config import SamplingParams
from jaxspec.llm import internals

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")

PROMPTS = [f"w{first} w{second}" for first in range(3, 9) for second in range(3, 9)]  # one has a long answer
ENDED = "document.getElementById('numbers').textContent.includes('the same tokens')"


@pytest.fixture(scope="module")
def llm(served_model):
    return jaxspec.LLM(served_model, draft=served_model, method=jaxspec.SwiftSpec(7, 4, depth=2), draft_devices=1)


@pytest.fixture(scope="module")
def page_server(llm):
    with Running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser, page_server):
    browser.open(page_server.url)
    browser.run("document.getElementById('forget').click()")
    browser.open(page_server.url)
    return browser


def text_of(browser, name):
    return browser.run(f"document.getElementById('{name}').textContent")


def count(browser, selector):
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def focused(browser):
    return browser.run("document.activeElement.id")


def fill(browser, prompt, tokens):
    """Write a prompt and a number of tokens; the prompt has the focus in the end."""
    browser.run("document.getElementById('prompt').focus()")
    browser.write(prompt)
    browser.press("Tab")
    browser.write(str(tokens))
    browser.press("Tab", modifiers=SHIFT)
    assert focused(browser) == "prompt"


def test_an_answer_streams_with_its_trees(page, llm):
    page.run("""
        window.seen = [];
        const found = document.getElementById("answer"), stop = document.getElementById("stop");
        new MutationObserver(() => seen.push([found.textContent, stop.disabled])).observe(found, {childList: true});
    """)
    prompt, wanted = long_prompt(llm)
    fill(page, prompt, 40)
    page.press("Enter")
    page.wait(ENDED)
    assert text_of(page, "answer") == wanted.text and text_of(page, "error") == ""
    partial = [text for text, over in page.run("seen") if text and text != wanted.text and not over]
    assert len(partial) > 3 and all(wanted.text.startswith(text) for text in partial)
    numbers = text_of(page, "numbers")
    assert f"tokens{len(wanted.token_ids)}ended by" in numbers and "the same tokensyes" in numbers
    assert "tokens/s of plain decoding" in numbers and "method" + internals(llm).engine.method.name in numbers
    assert count(page, "#answer .accepted")
    drawn = page.run("document.querySelector('#tree svg').getAttribute('aria-label')").split()
    drafted, accepted = int(drawn[0]), int(drawn[3])
    assert count(page, "#tree rect") == drafted + 1 > 1
    assert count(page, "#tree rect[stroke-dasharray='']") == accepted + 1
    assert count(page, "#chart rect") and count(page, "#timeline rect")
    assert not page.run("document.getElementById('both').hidden")


def long_prompt(llm):
    """A prompt whose answer is not over at once."""
    asked = ((p, llm.chat([{"role": "user", "content": p}], SamplingParams(max_tokens=40))) for p in PROMPTS)
    return next((prompt, answer) for prompt, answer in asked if answer.finish_reason == "length")


def test_switches_give_the_plain_text_and_no_second_answer(page, llm):
    page.run("document.getElementById('text').click(); document.getElementById('compare').click()")
    fill(page, long_prompt(llm)[0], 40)
    page.press("Enter")
    ended = "document.getElementById('numbers').textContent.includes('tokens/s')"
    page.wait(f"{ended} && !document.getElementById('send').disabled")
    assert "plain decoding" not in text_of(page, "numbers")
    struck = "[...document.querySelectorAll('#answer span')].map(s => getComputedStyle(s, '::before').content)"
    assert set(page.run(struck)) == {"none"}


def test_earlier_answers_stay_and_a_conversation_goes_on(page, page_server, llm):
    prompt, wanted = long_prompt(llm)
    fill(page, prompt, 40)
    page.press("Enter")
    page.wait(ENDED)
    shown = "[...document.querySelectorAll('#turns p')].map(p => p.textContent)"
    asked, answered, note = page.run(shown)
    assert (asked, answered) == (prompt, wanted.text) and note.startswith("40 tokens at ")
    page.open(page_server.url)
    assert page.run(shown) == [asked, answered, note]
    page.run("document.getElementById('chat').click()")
    fill(page, "w9", 3)
    page.press("Enter")
    page.wait(ENDED)
    sent = [e["params"]["request"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    messages = json.loads(next(request["postData"] for request in sent if "postData" in request))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"] and messages[1]["content"] == wanted.text
    assert len(page.run(shown)) == 6
    page.run("document.querySelector('#turns article:last-child button').click()")
    assert page.run("document.getElementById('prompt').value") == prompt
    page.run("document.getElementById('forget').click()")
    assert page.run("document.getElementById('past').hidden") and focused(page) == "prompt"


def test_nothing_comes_from_another_machine(page, page_server):
    fill(page, "w1", 5)
    page.press("Enter")
    page.wait(ENDED)
    asked = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert f"{page_server.url}/v1/live" in asked
    assert not [url for url in asked if not url.startswith((f"{page_server.url}/", "data:"))]
    # What the page's own policy forbids, what fails, and what a script throws.
    entries = [e["params"]["entry"] for e in page.events if e["method"] == "Log.entryAdded"]
    assert not [entry for entry in entries if entry["level"] == "error"]
    assert not [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]


@pytest.mark.parametrize("width", [1280, 400])
def test_no_screen_needs_a_scroll_bar_to_the_side(browser, page_server, width):
    browser.open(page_server.url, width)
    fill(browser, "w1 w2", 40)
    browser.press("Enter")
    browser.wait(ENDED)
    whole, seen = browser.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert whole == seen <= width
    assert len(base64.b64decode(browser.call("Page.captureScreenshot")["data"])) > 10_000


def test_the_keyboard_reaches_everything(page, page_server):
    order = []
    for _ in range(8):
        page.press("Tab")
        order.append(focused(page))
    assert order == ["prompt", "tokens", "temperature", "text", "compare", "chat", "send", "tree"]
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    fill(page, "w1 w2", 300)
    scheduler = page_server.api.scheduler
    step = scheduler._step
    scheduler._step = lambda job: (time.sleep(0.05), step(job))[1]
    try:
        page.press(*["Tab"] * 6, "Enter")  # the button
        assert focused(page) == "stop"
        page.wait("document.getElementById('answer').textContent")
        page.press("Escape")
        page.wait("document.activeElement.id === 'send'")
        page_server.wait_idle()
    finally:
        scheduler._step = step
    assert text_of(page, "error") == "" and text_of(page, "answer")
