from hypothesis import given
from hypothesis import strategies as st

from polydraft.cli.spelling import StreamDecoder
from polydraft.training.windows import train_tokenizer

TOKENIZER = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 20, vocab_size=300, context=64)


@given(st.text(min_size=1))
def test_streamed_pieces_join_to_the_whole_text(text: str) -> None:
    decoder = StreamDecoder(TOKENIZER.decode)
    pieces = [decoder.add(token) for token in TOKENIZER(text)["input_ids"]]
    assert "".join(pieces) + decoder.rest() == text


def test_an_unfinished_character_waits() -> None:
    decoder = StreamDecoder(TOKENIZER.decode)
    pieces = [decoder.add(token) for token in TOKENIZER("€!")["input_ids"]]
    assert pieces == ["", "", "€", "!"]
