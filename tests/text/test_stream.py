"""Streaming gives the text of `decode`, whole characters only, and finds stop strings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodflash.tokenizer import StreamDecoder, Tokenizer

TEXTS = {
    "emoji": "family 👨\u200d👩\u200d👧\u200d👦 thumb 👍🏽 flag 🏳️\u200d🌈 🇰🇷",
    "korean": "안녕하세요, 만나서 반갑습니다. 뷁",
    "thai": "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "marks": "Cafe\u0301 Z\u0335\u0321\u0328a\u0301\u0316lgo हिन्दी",
    "spaces": "  hello \n\n  world ",
    "replacement": "a \ufffd\ufffd b \ufffd",
}


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = ()):
    """Push `ids` in groups of `sizes`, over and over; return the shown pieces and the decoder."""
    decoder = StreamDecoder(tokenizer, stop)
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(decoder.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, decoder.finish()], decoder


def naive_stop(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]):
    """Decode every prefix: the text before the first stop string, the string, the tokens kept."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        found = [(text.find(s), len(s), s) for s in stop if s in text]
        if found:
            start, _, which = min(found)
            return text[:start], which, count
    return tokenizer.decode(ids), None, len(ids)


@pytest.mark.parametrize("size", [1, 8, 16])
@pytest.mark.parametrize("name", TEXTS)
def test_text_streams_exactly(any_tokenizer, name, size):
    ids = any_tokenizer.encode(TEXTS[name])
    pieces, decoder = stream(any_tokenizer, ids, [size])
    assert "".join(pieces) == any_tokenizer.decode(ids)
    assert decoder.num_tokens == len(ids)
    if name != "replacement":
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", TEXTS)
def test_qwen3_streams_exactly(qwen3_tokenizer, name, size):
    ids = qwen3_tokenizer.encode(TEXTS[name])
    pieces, _ = stream(qwen3_tokenizer, ids, [size])
    assert "".join(pieces) == qwen3_tokenizer.decode(ids)
    if name != "replacement":
        assert not any("\ufffd" in piece for piece in pieces)


def check_random_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # 8 ids beyond the vocabulary: the padded rows of an embedding table
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 7), max_size=24))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    pieces, decoder = stream(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert (decoder.num_tokens, decoder.stopped) == (len(ids), None)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_ids_stream_exactly(any_tokenizer, data):
    check_random_ids(any_tokenizer, data)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_qwen3_ids_stream_exactly(qwen3_tokenizer, data):
    check_random_ids(qwen3_tokenizer, data)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_stops_agree_with_decoding_every_prefix(any_tokenizer, data):
    words = st.sampled_from(["he", "llo", " ", "STOP", "rst", "👍", "#", "###", "é", "o r", "\n"])
    text = "".join(data.draw(st.lists(words, max_size=10)))
    stop = tuple(
        data.draw(st.sets(st.text("heloSTOPrst# 👍\n", min_size=1, max_size=4), max_size=3))
    )
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ids = any_tokenizer.encode(text)
    pieces, decoder = stream(any_tokenizer, ids, sizes, stop)
    expected = naive_stop(any_tokenizer, ids, stop)
    assert ("".join(pieces), decoder.stopped, decoder.num_tokens) == expected


def test_characters_are_shown_as_soon_as_they_are_whole(byte_level_tokenizer):
    # f0 9f 91 8d, as byte-level vocabularies spell them
    ids = [byte_level_tokenizer.backend.token_to_id(piece) for piece in ("ð", "Ł", "ĳ", "į", "a")]
    decoder = StreamDecoder(byte_level_tokenizer)
    assert [decoder.push([i]) for i in ids] == ["", "", "", "👍", "a"]


def test_added_token_behind_unfinished_bytes(byte_level_tokenizer):
    ids = [byte_level_tokenizer.backend.token_to_id(piece) for piece in ("ð", "ok 你", "a")]
    pieces, _ = stream(byte_level_tokenizer, ids, [1])
    assert pieces == ["", "\ufffdok 你", "a", ""]


def test_bytes_that_cannot_become_a_character_do_not_pile_up(byte_level_tokenizer):
    bad = byte_level_tokenizer.backend.token_to_id("ÿ")
    decoder = StreamDecoder(byte_level_tokenizer)
    assert decoder.push([bad] * 5) == "\ufffd" * 5


def test_unfinished_bytes_come_out_at_the_end(any_tokenizer):
    ids = any_tokenizer.encode("a 뷁")[:-1]
    decoder = StreamDecoder(any_tokenizer)
    shown = decoder.push(ids)
    assert "\ufffd" not in shown
    assert shown + decoder.finish() == any_tokenizer.decode(ids)
    assert decoder.finish() == ""


def test_special_and_unknown_ids_inside_a_character(any_tokenizer):
    ids = any_tokenizer.encode("a뷁b")
    special = any_tokenizer.backend.token_to_id("<|end|>")
    mixed = [i for token in ids for i in (special, token, any_tokenizer.vocab_size + 3)]
    pieces, decoder = stream(any_tokenizer, mixed, [1])
    assert "".join(pieces) == any_tokenizer.decode(ids)
    assert decoder.num_tokens == len(mixed)


def single(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a character (ASCII)."""
    vocab = tokenizer.backend.get_vocab()
    return [vocab[char] for char in text]


def test_stop_across_tokens(byte_level_tokenizer):
    decoder = StreamDecoder(byte_level_tokenizer, ("STOP",))
    pushed = [decoder.push([i]) for i in single(byte_level_tokenizer, "abSTOPcd")]
    assert pushed == ["a", "b", "", "", "", "", "", ""]
    assert (decoder.stopped, decoder.num_tokens, decoder.finish()) == ("STOP", 6, "")


def test_stop_within_one_push(byte_level_tokenizer):
    decoder = StreamDecoder(byte_level_tokenizer, ("STOP",))
    assert decoder.push(single(byte_level_tokenizer, "abSTOPcdSTOP")) == "ab"
    assert (decoder.stopped, decoder.num_tokens) == ("STOP", 6)
    assert decoder.push(single(byte_level_tokenizer, "more")) == ""
    assert (decoder.num_tokens, decoder.finish()) == (6, "")


def test_stop_inside_one_token(byte_level_tokenizer):
    think = byte_level_tokenizer.backend.token_to_id("<think>")
    decoder = StreamDecoder(byte_level_tokenizer, ("ink", "hi", "k>"))
    assert decoder.push([think]) == "<t"  # of one token's stop strings, the one that starts first
    assert (decoder.stopped, decoder.num_tokens) == ("hi", 1)


def test_overlapping_stops_end_with_the_first_token_that_completes_one(byte_level_tokenizer):
    decoder = StreamDecoder(byte_level_tokenizer, ("abcd", "bc"))
    assert decoder.push(single(byte_level_tokenizer, "xabcd")) == "xa"
    assert (decoder.stopped, decoder.num_tokens) == ("bc", 4)


def test_held_text_is_released_when_it_cannot_become_a_stop(byte_level_tokenizer):
    decoder = StreamDecoder(byte_level_tokenizer, ("aab",))
    pushed = [decoder.push([i]) for i in single(byte_level_tokenizer, "aaaxa")]
    assert pushed == ["", "", "a", "aax", ""]
    assert (decoder.finish(), decoder.stopped, decoder.num_tokens) == ("a", None, 5)


def test_stop_inside_an_open_run_of_byte_tokens(byte_fallback_tokenizer):
    newline, letter = map(byte_fallback_tokenizer.backend.token_to_id, ("<0x0A>", "a"))
    for stop, text in (("\n", "ba"), ("a\n", "b")):
        decoder = StreamDecoder(byte_fallback_tokenizer, (stop,))
        ids = [*single(byte_fallback_tokenizer, "b"), letter, newline, newline, letter]
        assert decoder.push(ids) == text
        assert (decoder.stopped, decoder.num_tokens) == (stop, 3)
