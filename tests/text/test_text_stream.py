"""Text from tokens as they come: equal to decoding all at once, cut at the right place, for any tokens."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import sentencepiece, smollm2

from jaxspec.text.stream import StopMatcher, StreamPiece, TextStream
from jaxspec.text.tokenizer import Tokenizer

TEXTS = ["Hello 你好 👩‍👩‍👧‍👦 naïve e\u0301 ok", "  spaces \n\n and नमस्ते दुनिया", "مرحبا 😀😃 done<|im_end|>"]

# Ids that matter: special tokens, single bytes (of which most orders are not UTF-8), any token, ids that are no token.
SMOLLM2_IDS = st.lists(st.integers(0, 18) | st.integers(17, 280) | st.integers(0, 49151) | st.integers(49152, 50000))
SENTENCEPIECE_IDS = st.lists(st.integers(0, 4) | st.integers(5, 260) | st.integers(5, 2999) | st.integers(3000, 3100))
BOTH = (st.just(smollm2), SMOLLM2_IDS), (st.just(sentencepiece), SENTENCEPIECE_IDS)
STREAMS = st.one_of(*(st.tuples(make, ids) for make, ids in BOTH))

PROPERTY = settings(max_examples=200, deadline=None)


def chunks(items, rng):
    while items:
        size = rng.randint(1, 4)
        yield items[:size]
        items = items[size:]


def run_stream(tokenizer: Tokenizer, ids, *, stops=(), ignore_eos=False, max_tokens=10**6, eos_ids=None):
    eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
    stream = TextStream(tokenizer, stops, () if ignore_eos else eos_ids, max_tokens)
    pieces: list[StreamPiece] = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.finish_reason is not None:
            break
    assert "".join(piece.text for piece in pieces) == stream.text
    assert sum(piece.num_tokens for piece in pieces) == len(stream.token_ids)
    return stream, pieces


@PROPERTY
@given(STREAMS, st.randoms(use_true_random=False), st.booleans())
def test_detokenizer_equals_decode(stream, rng, skip):
    make, ids = stream
    tokenizer = make()
    detokenizer = tokenizer.make_detokenizer(skip)
    text = "".join(detokenizer.push(chunk) for chunk in chunks(ids, rng)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip)


@PROPERTY
@given(SMOLLM2_IDS)
def test_decode_equals_the_library_on_any_ids(ids):
    tokenizer = smollm2()
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@PROPERTY
@given(SENTENCEPIECE_IDS)
def test_sentencepiece_decode_equals_the_library_on_valid_text(ids):
    tokenizer = sentencepiece()
    theirs = tokenizer._backend.decode(ids)
    if "\ufffd" not in theirs:
        assert tokenizer.decode(ids) == theirs


def test_sentencepiece_keeps_valid_characters_beside_invalid_bytes():
    tokenizer = sentencepiece()
    byte_tokens = [5 + byte for byte in "你".encode() + b"\xff"]
    # The library gives up on the whole run; text that was streamed already must not change.
    assert tokenizer.decode(byte_tokens) == "你\ufffd"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [smollm2, sentencepiece])
def test_characters_are_never_split(make, text):
    tokenizer = make()
    detokenizer = tokenizer.make_detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text.replace("<|im_end|>", "") and detokenizer.finish() == ""


def test_work_per_token_does_not_grow_with_the_text():
    tokenizer = smollm2()
    rng = random.Random(0)
    ids = [rng.randrange(49152) for _ in range(4000)]

    def count_calls(tokens):
        """Python calls that pushing all tokens makes: a count, where a time would depend on the machine."""
        stream = TextStream(tokenizer, ("\n\nQ:", "<END>"), (), 10**6)
        calls = 0

        def profile(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            for token_id in tokens:
                stream.push(token_id)
        finally:
            sys.setprofile(None)
        return calls

    count_calls(ids)
    assert count_calls(ids) < 2 * 8 * count_calls(ids[:500])


@PROPERTY
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("abc", max_size=3)))
def test_stop_matcher_equals_a_search(stops, pieces):
    matcher, given_out, text = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        starts = [text.find(stop) for stop in stops if stop in text]
        safe, stopped = matcher.push(piece)
        given_out += safe
        assert stopped == bool(starts)
        if starts:
            assert given_out == text[: min(starts)]
            return
        # Held back is no more than what may begin a stop string.
        assert text.startswith(given_out)
        held = text[len(given_out) :]
        assert len(held) < max(map(len, stops))
        assert not held or any(stop.startswith(held) for stop in stops)
    assert given_out + matcher.finish() == text


@PROPERTY
@given(STREAMS, st.data())
def test_stream_equals_brute_force(stream, data):
    make, ids = stream
    tokenizer = make()
    text = tokenizer.decode(ids)
    # Stop strings out of the text itself, so that they are found, and one that seldom is.
    cuts = st.integers(0, max(len(text) - 1, 0))
    drawn = data.draw(st.lists(st.tuples(cuts, st.integers(1, 3)), max_size=2))
    stops = tuple({text[i : i + size] for i, size in drawn} - {""}) + data.draw(st.sampled_from([(), ("zq",)]))
    check_stream(tokenizer, ids, stops, data.draw(st.booleans()), data.draw(st.integers(1, len(ids) + 2)))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 4, 5, 6, 7]), min_size=2, max_size=12),
    st.sets(st.sampled_from(["A", "B", "AB", "\ufffdA", "🧿"]), min_size=1),
    st.booleans(),
)
def test_stream_of_broken_characters_equals_brute_force(choices, stops, ignore_eos):
    # The four bytes of one character in tokens of their own, letters, a special token and the end.
    tokenizer = sentencepiece()
    alphabet = [*(5 + byte for byte in "🧿".encode()), *(5 + byte for byte in b"AB"), 3, 2]
    check_stream(tokenizer, [alphabet[choice] for choice in choices], tuple(stops), ignore_eos, len(choices) + 1)


def check_stream(tokenizer, ids, stops, ignore_eos, max_tokens):
    result, pieces = run_stream(tokenizer, ids, stops=stops, ignore_eos=ignore_eos, max_tokens=max_tokens)
    detokenizer, seen = tokenizer.make_detokenizer(), ""
    expected = None
    for count, token_id in enumerate(ids, 1):
        ended = token_id in tokenizer.eos_ids and not ignore_eos
        last = ended or count == max_tokens
        seen += "" if ended else detokenizer.push([token_id])
        seen += detokenizer.finish() if last else ""
        starts = [seen.find(stop) for stop in stops if stop in seen]
        if starts:
            cut = seen[: min(starts)]
            kept = next(n for n in range(count + 1) if tokenizer.decode(ids[:n]).startswith(cut))
            expected = (cut, tuple(ids[:kept]), "stop")
        elif last:
            expected = (seen, tuple(ids[:count]), "stop" if ended else "length")
        if expected:
            assert len(pieces) == count
            break
    if expected is None:
        assert result.finish_reason is None and seen.startswith(result.text)
        return
    assert (result.text, result.token_ids, result.finish_reason) == expected


def test_each_end_of_sequence_token_ends_the_text():
    tokenizer = smollm2()
    ids = tokenizer.encode("Yes.")
    for end in (0, 2):
        stream, _ = run_stream(tokenizer, [*ids, end], eos_ids=(0, 2))
        assert (stream.token_ids, stream.finish_reason) == ((*ids, end), "stop")


def test_an_ordinary_token_may_end_the_text():
    # A model may name a token that is no special token: still it is not shown.
    tokenizer = smollm2()
    ids = tokenizer.encode("Yes.\n")
    stream, _ = run_stream(tokenizer, ids, eos_ids=(ids[-1],))
    assert (stream.text, stream.token_ids) == ("Yes.", tuple(ids))


def test_a_stop_string_across_tokens():
    tokenizer = smollm2()
    ids = tokenizer.encode("Answer: 12345 and more")
    stream, pieces = run_stream(tokenizer, ids, stops=("234",))
    assert (stream.text, stream.finish_reason) == ("Answer: 1", "stop")
    assert tokenizer.decode(stream.token_ids) == "Answer: 1"
    # What may be cut is not given out, neither as text nor as tokens.
    assert [(piece.text, piece.num_tokens) for piece in pieces[-3:]] == [("", 0)] * 3


def test_nothing_follows_the_end():
    tokenizer = smollm2()
    stream, _ = run_stream(tokenizer, [2])
    with pytest.raises(RuntimeError, match="finished"):
        stream.push(5)


@PROPERTY
@given(stream=STREAMS, stops=st.lists(st.sampled_from(["a", " the", "\ufffd", "e s"]), max_size=2))
def test_an_aborted_text_holds_all_tokens_so_far(stream, stops):
    """Nothing stays held back, neither half a character nor half a stop string."""
    make, ids = stream
    tokenizer = make()
    text = TextStream(tokenizer, stops, (), 10**6)
    pushed = []
    for token_id in ids:
        pushed.append(token_id)
        if text.push(token_id).finish_reason is not None:
            break
    else:
        text.abort()
    whole = tokenizer.decode(pushed)
    found = [whole.index(stop) for stop in stops if stop in whole]
    assert text.text == (whole[: min(found)] if found else whole)
    assert text.finish_reason == ("stop" if found else "abort")
    assert found or text.token_ids == tuple(pushed)
    with pytest.raises(RuntimeError, match="is finished"):
        text.abort()
