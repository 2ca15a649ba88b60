"""Text piece by piece: the pieces are the whole, no broken character comes early, and stop strings end it."""

import random
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polydraft import StreamDecoder
from polydraft.errors import InvalidParameter
from polydraft.models import bytes_of, text_of
from polydraft.models.text.stream_decoder import _checked, _listed, checked_stop
from polydraft.training.token_files import train_tokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@cache
def byte_level() -> Any:
    """Return a tokenizer whose tokens are bytes and pieces of characters."""
    text = ["def add(a, b):\n    return a + b\n", "class Point:  # 点 é 😀👩‍👩‍👧 ½\n"] * 20
    return train_tokenizer(text, vocab_size=320, context=64)


@cache
def embedded() -> Any:
    return AutoTokenizer.from_pretrained(str(files("polydraft") / "data" / "pair" / "target"))


@cache
def metaspace() -> Any:
    """Return a tokenizer like Llama 2's: words with a mark for the space before them, and bytes for the rest."""
    words = ["▁", "▁the", "▁end", "s", "e", "▁a", "\ufffd", "é", "▁</s>x"]
    vocabulary = [("<unk>", 0.0), *((one, -1.0) for one in (*BYTES, *words))]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrapped(tokenizer)


@cache
def word_piece() -> Any:
    words = ["[UNK]", "play", "##ing", "##ed", ".", "!", "a", "'", "##s", "\ufffd"]
    tokenizer = Tokenizer(WordPiece({one: place for place, one in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return wrapped(tokenizer)


@cache
def with_suffix() -> Any:
    """Return a tokenizer that marks the ends of words, so that a token's text changes when another follows."""
    words = ["a", "a</w>", "b</w>", "c", ".</w>"]
    tokenizer = Tokenizer(BPE({one: place for place, one in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return wrapped(tokenizer)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "embedded": embedded,
    "metaspace": metaspace,
    "word-piece": word_piece,
    "suffix": with_suffix,
}
TEXTS = [
    "naïve 👩‍👩‍👧 - 点。€",
    "the end's",
    "\ufffd",
    "a\ufffd\ufffd\ufffdé",
    "😀" * 9,
    "é" * 30,
    "\u0301\u200d",
    " a  the ",
]


def pieces_of(tokenizer: Any, ids: list[int], **options: Any) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.add(token) for token in ids), decoder.rest()], decoder


def ids_of(tokenizer: Any, number: int, length: int = 40) -> list[int]:
    """Return random ids; those that are more than the tokenizer has are among them, as models have."""
    choose = random.Random(number)
    alphabet = list(range(len(tokenizer) + 2))
    few = choose.sample(alphabet, 3)
    return [choose.choice(few if number % 3 == 0 else alphabet) for _ in range(length)]


@pytest.mark.parametrize("kind", ["byte-level", "embedded"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(bytes_of(tokenizer, token) for token in ids) == text.encode()


def test_bytes_are_told_of_tokens_of_every_kind() -> None:
    for place, name in enumerate(BYTES[0xC0:0xF0], 0xC0):
        assert bytes_of(metaspace(), metaspace().convert_tokens_to_ids(name)) == bytes([place])
    for kind, name in ((metaspace, "\ufffd"), (metaspace, "é"), (word_piece, "\ufffd"), (word_piece, "play")):
        assert bytes_of(kind(), kind().convert_tokens_to_ids(name)) == name.encode()
    assert bytes_of(byte_level(), len(byte_level()) + 5) == b""


@pytest.mark.long(4)
@pytest.mark.parametrize("kind", ["byte-level", "embedded", "word-piece", "suffix"])
@pytest.mark.parametrize("skipped", [True, False])
def test_the_pieces_of_any_tokens_are_the_whole_text(kind: str, skipped: bool) -> None:
    tokenizer, several = KINDS[kind](), 0
    for number in range(150):
        ids = ids_of(tokenizer, number)
        pieces, decoder = pieces_of(tokenizer, ids, skip_special_tokens=skipped)
        assert "".join(pieces) == text_of(tokenizer, ids, skipped) == tokenizer.decode(ids, skip_special_tokens=skipped)
        several += sum(map(bool, pieces)) > 5
        together = StreamDecoder(tokenizer, skip_special_tokens=skipped)
        assert together.add(torch.tensor(ids)) + together.rest() == "".join(pieces)
        assert decoder.rest() == "" and decoder.stopped is None
    assert several > 100


@pytest.mark.parametrize("kind", ["byte-level", "embedded", "metaspace"])
@given(st.one_of(st.sampled_from(TEXTS), st.text()))
def test_the_pieces_of_a_text_are_the_text_and_nothing_is_broken(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if kind == "metaspace":
        text = text_of(tokenizer, ids)
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def common(one: str, other: str) -> int:
    """Return with how many characters both begin."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@pytest.mark.parametrize("kind", ["byte-level", "embedded", "word-piece", "suffix"])
@pytest.mark.parametrize("skipped", [True, False])
def test_tokens_begin_where_the_text_before_them_ends(kind: str, skipped: bool) -> None:
    """But for a token that goes on with a broken character, which begins where this one does."""
    tokenizer = KINDS[kind]()
    for number in range(60):
        ids = ids_of(tokenizer, number)
        pieces, decoder = pieces_of(tokenizer, ids, skip_special_tokens=skipped)
        text = "".join(pieces)
        ends = [common(text_of(tokenizer, ids[:place], skipped), text) for place in range(len(ids))]
        assert decoder.begins == sorted(decoder.begins)
        for begin, end in zip(decoder.begins, ends, strict=True):
            assert begin == end or (begin == end - 1 and text[begin] == "\ufffd")


def test_all_tokens_of_a_character_begin_with_it() -> None:
    fallback = metaspace()
    ids = [fallback.convert_tokens_to_ids(f"<0x{value:02X}>") for value in "é😀x".encode()]
    assert pieces_of(fallback, ids)[1].begins == [0, 0, 1, 1, 1, 1, 2]
    assert pieces_of(byte_level(), byte_level()("a€b")["input_ids"])[1].begins == [0, 1, 1, 1, 2]
    lone, (a,) = [byte_id(byte_level(), value) for value in b"\xc3\xf0\x9f"], byte_level()("a")["input_ids"]
    assert pieces_of(byte_level(), [lone[0], a, *lone[1:], a])[1].begins == [0, 1, 2, 2, 3]
    end = fallback.convert_tokens_to_ids("<end>")
    assert pieces_of(fallback, [*ids[2:4], end, *ids[4:], end])[1].begins == [0, 0, 0, 0, 0, 1, 2]


def test_bytes_of_a_character_wait_and_no_longer_than_they_must() -> None:
    tokenizer = byte_level()
    pieces, _ = pieces_of(tokenizer, tokenizer("€!")["input_ids"])
    assert pieces == ["", "", "€", "!", ""]
    fallback = metaspace()
    ids = [fallback.convert_tokens_to_ids(f"<0x{value:02X}>") for value in "é😀x".encode()]
    assert pieces_of(fallback, ids)[0] == ["", "é", "", "", "", "😀", "x", ""]


def test_a_given_character_is_not_taken_back_when_an_invalid_byte_follows() -> None:
    tokenizer = metaspace()
    ids = tokenizer.convert_tokens_to_ids([f"<0x{value:02X}>" for value in b"\xc3\xa9\xff"])
    ids += tokenizer.convert_tokens_to_ids(["▁the"])
    assert pieces_of(tokenizer, ids)[0] == ["", "é", "", "\ufffd the", ""]
    assert tokenizer.decode(ids) == "\ufffd\ufffd\ufffd the"


@pytest.mark.parametrize("number", range(60))
def test_random_bytes_between_words(number: int) -> None:
    """With bytes that are one by one no character, there is nothing to take back, and the text is the whole."""
    tokenizer, choose = metaspace(), random.Random(number)
    names = [*(f"<0x{value:02X}>" for value in (0x80, 0xFF, 0xE0, 0xF0)), "▁the", "s", "▁", "\ufffd", "<end>"]
    ids = tokenizer.convert_tokens_to_ids([choose.choice(names) for _ in range(50)])
    assert "".join(pieces_of(tokenizer, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("what", ["invalid", "real", "unfinished"])
def test_endless_broken_characters_flow_at_a_bounded_cost(
    kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]()
    text = {"invalid": b"\xff", "real": "\ufffd".encode(), "unfinished": b"\xe2"}[what]
    if kind == "metaspace":
        ids = tokenizer.convert_tokens_to_ids(["\ufffd"] if what == "real" else [f"<0x{value:02X}>" for value in text])
    else:
        ids = [byte_id(tokenizer, value) for value in text]
    longest = []
    original = type(tokenizer).decode

    def decode(self: Any, tokens: Any, *arguments: Any, **options: Any) -> Any:
        longest.append(len(tokens))
        return original(self, tokens, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "decode", decode)
    decoder, given_so_far = StreamDecoder(tokenizer), 0
    for step in range(1, 301):
        given_so_far += len(decoder.add(ids))
        assert step - 3 <= given_so_far <= step
    assert given_so_far + len(decoder.rest()) == 300 and max(longest) < 40


def byte_id(tokenizer: Any, value: int) -> int:
    """Return the token of a byte-level tokenizer for one byte."""
    return next(
        index
        for index in range(len(tokenizer))
        if tokenizer.decode([index]) == "\ufffd" and decoded_byte(tokenizer, index) == value
    )


def decoded_byte(tokenizer: Any, index: int) -> int | None:
    """Return the byte of a token of one byte that is no character alone."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}
    return letters.get(tokenizer.convert_ids_to_tokens(index))


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    for tokenizer, ids in (
        (byte_level(), byte_level()("€")["input_ids"]),
        (metaspace(), metaspace().convert_tokens_to_ids([f"<0x{value:02X}>" for value in "€".encode()])),
    ):
        mixed = [part for one in ids for part in [one, *[tokenizer.eos_token_id] * 40]]
        assert "".join(pieces_of(tokenizer, mixed)[0]) == "€"
        shown = "".join(pieces_of(tokenizer, mixed, skip_special_tokens=False)[0])
        assert shown == tokenizer.decode(mixed) and shown.count(tokenizer.eos_token) == 120


@given(
    st.text(alphabet="ab€ .\n", max_size=30), st.lists(st.text(alphabet="ab€ .\n", min_size=1, max_size=5), max_size=3)
)
def test_a_text_ends_before_its_first_stop_string_however_it_is_cut(text: str, stop: list[str]) -> None:
    tokenizer = byte_level()
    ids = tokenizer(text)["input_ids"]
    ends = sorted((text.find(one) + len(one), text.find(one), one) for one in stop if one in text)
    for included in (False, True):
        for size in (1, 2, 5, 100):
            decoder = StreamDecoder(tokenizer, stop, include_stop=included)
            got = "".join(decoder.add(ids[at : at + size]) for at in range(0, len(ids), size))
            if ends:
                assert (got, decoder.rest()) == (text[: ends[0][0 if included else 1]], "")
            else:
                assert got + decoder.rest() == text
            assert decoder.stopped == (ends[0][2] if ends else None)
            assert decoder.add(ids) == "" or not ends


def test_the_beginning_of_a_stop_string_waits() -> None:
    tokenizer = byte_level()
    decoder = StreamDecoder(tokenizer, "a+b")
    assert [decoder.add(tokenizer(one)["input_ids"]) for one in ("xa", "+", "ca", "+b?")] == ["x", "", "a+c", ""]
    assert decoder.stopped == "a+b" and decoder.rest() == ""
    decoder = StreamDecoder(tokenizer, ["a+b"], include_stop=True)
    assert [decoder.add(tokenizer(one)["input_ids"]) for one in ("xa", "+b?")] == ["x", "a+b"]
    decoder = StreamDecoder(tokenizer, ["a+b", "+b"])
    assert decoder.add(tokenizer("xa+b")["input_ids"]) == "x" and decoder.stopped == "a+b"
    decoder = StreamDecoder(tokenizer, "€!")
    assert decoder.add(tokenizer("a€")["input_ids"]) + decoder.rest() == "a€" and decoder.stopped is None


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    tokenizer = byte_level()
    decoder = StreamDecoder(tokenizer, "\ufffd")
    assert decoder.add(tokenizer("a€")["input_ids"][:-1]) == "a" and decoder.stopped is None
    assert decoder.rest() == "" and decoder.stopped == "\ufffd"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: _checked("gpt2"), "needs a tokenizer, such as pair.tokenizer, not 'gpt2'"),
        (lambda: StreamDecoder(byte_level(), ""), "stop must be texts of at least one character, but is ''"),
        (lambda: StreamDecoder(byte_level(), ["a", ""]), r"but is \['a', ''\]"),
        (lambda: checked_stop(3), "but is 3"),
        (lambda: StreamDecoder(byte_level()).add(-1), "a whole number of at least 0, but -1 was added"),
        (lambda: _listed([1.5]), r"but \[1.5\] was added"),
        (lambda: _listed("text"), "but 'text' was added"),
        (lambda: StreamDecoder(byte_level()).add([True]), r"but \[True\] was added"),
    ],
)
def test_what_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        call()
