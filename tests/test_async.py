"""`AsyncLLM` and threads: the answers of `LLM`, many at a time, and nothing left of those that were given up."""

import asyncio
import contextlib
import copy
import gc
import pickle
import threading
import time

import pytest
from native_models import LLAMA, write_model

import jaxspec
from jaxspec.llm import internals
from jaxspec.scheduler import OrderedLock, QueueError

LONG = jaxspec.SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("async") / "tiny"
    write_model(folder, LLAMA)
    return jaxspec.LLM(folder)


def idle(model):
    """Until no request waits or is decoded, at most ten seconds."""

    async def wait():
        while model._scheduler._active or model._scheduler._waiting:
            await asyncio.sleep(0.01)

    return asyncio.wait_for(wait(), 10)


def test_answers_equal_those_of_llm(llm):
    sampling = [jaxspec.SamplingParams(max_tokens=20, temperature=i % 2, seed=i) for i in range(16)]
    prompts = [f"w{i} w7" for i in range(16)]
    wanted = [llm.generate(p, s).text for p, s in zip(prompts, sampling, strict=True)]
    several = jaxspec.SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=3)
    alternatives = [c.text for c in llm.generate("w1", several).outputs]

    async def ask():
        async with jaxspec.AsyncLLM(llm) as model:
            together = await asyncio.gather(*map(model.generate, prompts, sampling))
            streamed = [event.text async for event in model.stream([{"role": "user", "content": "w1"}], LONG)]
            return [c.text for c in together], "".join(streamed), (await model.generate("w1", several)).outputs

    texts, streamed, outputs = asyncio.run(ask())
    assert texts == wanted
    assert streamed == llm.generate("w1", LONG).text
    assert [c.text for c in outputs] == alternatives


def test_what_is_given_up_leaves_nothing(llm):
    async def ask():
        async with jaxspec.AsyncLLM(llm, max_active=1) as model:
            step = model._scheduler._step
            model._scheduler._step = lambda job: (time.sleep(0.01), step(job))[1]
            events = model.stream("w1", LONG)
            await anext(events)
            waiting = asyncio.ensure_future(model.generate("w2", LONG))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await events.aclose()
            await idle(model)
            async for _ in model.stream("w1", LONG):
                break  # the loop's end closes the stream
            gc.collect()
            await idle(model)
            task = asyncio.ensure_future(model.generate("w3", LONG))
            await asyncio.sleep(0.02)
            task.cancel()
            await idle(model)
            return await model.generate("w1", LONG)

    assert asyncio.run(ask()).token_ids == llm.generate("w1", LONG).token_ids


def test_errors_reach_who_asked(llm, monkeypatch):
    async def ask():
        model = jaxspec.AsyncLLM(llm)
        with pytest.raises(jaxspec.ConfigError, match="empty"):
            await model.generate([])
        with monkeypatch.context() as patch:
            patch.setattr(internals(llm).engine, "open", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await model.generate("w1")
        assert (await model.generate("w1", LONG)).token_ids
        scheduler, step = model._scheduler, model._scheduler._step

        def step_or_wait(job):  # no text is complete before `close`
            while job.first is not None and scheduler._closing is None:
                time.sleep(0.001)
            return step(job)

        scheduler._step = step_or_wait
        under_way = model.stream("w1", LONG)
        await anext(under_way)
        await model.close()
        with pytest.raises(QueueError, match="shutting down"):
            [event async for event in under_way]
        with pytest.raises(QueueError, match="shutting down"):
            await model.generate("w1")

    asyncio.run(ask())
    with pytest.raises(jaxspec.ConfigError, match="dtype"):
        jaxspec.AsyncLLM(llm, dtype="float32")
    with pytest.raises(jaxspec.ConfigError, match="max_active"):
        jaxspec.AsyncLLM(llm, max_active=0)


def test_threads_share_a_model(llm):
    """Calls, streams and streams that are dropped, all at once, equal those alone."""
    wanted = {i: llm.generate(f"w{i}", LONG).token_ids for i in range(8)}
    got = {}

    def work(index):
        with llm.stream("w9 w9", LONG) as dropped:
            next(dropped)
        if index % 2:
            got[index] = llm.generate(f"w{index}", LONG).token_ids
        else:
            *_, last = llm.stream(f"w{index}", LONG)
            got[index] = last.completion.token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == wanted


def test_turns_are_taken_in_order():
    turns, order, queued = OrderedLock(), [], threading.Semaphore(0)

    def work(index):
        queued.release()
        with turns, turns:  # its holder may take it again
            order.append(index)

    threads = []
    with turns:
        for index in range(8):
            threads.append(threading.Thread(target=work, args=(index,)))
            threads[-1].start()
            queued.acquire()
            while len(turns._waiting) <= index:
                pass
    for thread in threads:
        thread.join(10)
    assert order == list(range(8))
    with contextlib.suppress(ZeroDivisionError), turns:
        raise ZeroDivisionError
    assert not turns._holder


def test_a_text_dropped_in_another_thread_does_not_wait_for_the_holder():
    """As when a stream is collected in a compiler's thread for which the holder of the lock waits."""
    turns, closed = OrderedLock(), []

    def events():
        try:
            yield 1
            yield 2
        finally:
            assert turns._holder == threading.get_ident()
            closed.append(threading.current_thread())

    text = turns.each(events())
    assert next(text) == 1
    with turns:
        thread = threading.Thread(target=text.close)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and not closed
    assert closed == [threading.current_thread()] and not turns._holder
    text = turns.each(events())
    next(text)
    text.close()  # the lock is free: at once
    assert len(closed) == 2 and not turns._holder


def test_a_short_request_does_not_wait_for_a_long_prompt(llm, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.CPU_PIECE", 1)
    prompt, few = list(range(45)), jaxspec.SamplingParams(max_tokens=10, ignore_eos=True)

    async def ask():
        async with jaxspec.AsyncLLM(llm) as model:
            step = model._scheduler._step
            model._scheduler._step = lambda job: (time.sleep(0.01), step(job))[1]
            events = model.stream(prompt, few)
            first = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.01)
            short = await model.generate("w1", jaxspec.SamplingParams(max_tokens=3, ignore_eos=True))
            early = not first.done()
            found = [await first, *[event async for event in events]]
            return short, early, found

    short, early, events = asyncio.run(ask())
    assert early and len(short.token_ids) == 3
    assert events[-1].completion.token_ids == llm.generate(prompt, few).token_ids and len(events) <= 11


def test_a_result_and_a_model_are_shown_in_a_line(llm):
    """And a model is not copied by accident; methods share its weights."""
    shown = repr(llm.generate("w1", LONG))
    assert "... 50 in all)" in shown and len(shown) < 2000
    assert repr(llm).startswith("<LLM 'tiny', method 'auto', draft None, on ")
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="load it anew"):
            copied(llm)
    assert llm.with_method("ar").generate("w1", LONG).token_ids == llm.generate("w1", LONG).token_ids
