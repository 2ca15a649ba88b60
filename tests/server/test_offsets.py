"""`text_offset`: where tokens begin in the text, the same in streams and in whole answers."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import ask, chunks, streamed

from polydraft.models import Pair

EMOJI = "(äö😀){3}"
END = "<|endoftext|>"
HOT = {"temperature": 100, "seed": 5, "max_tokens": 30, "ignore_eos": True}
"""So hot that most bytes are no characters."""
ASKED: list[dict[str, Any]] = [
    {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24},
    {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24, "stop": "😀ä"},
    {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24, "stop": ["ö😀äöx", "😀äö😀"]},
    {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24, "stop": "😀ä", "include_stop_str_in_output": True},
    {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 8, "echo": True, "prompt": "ü€ = "},
    {"temperature": 1, "seed": 3, "max_tokens": 20, "n": 2, "echo": True},
    {**HOT},
    {**HOT, "n": 3, "skip_special_tokens": False},
    {**HOT, "stop": ["e", "\ufffd\ufffd"], "echo": True, "prompt": [5, 3000, 200, 0, 201, 7]},
    {"temperature": 0, "max_tokens": 16, "stop": ["            and more", "never said"]},
    {"temperature": 0, "max_tokens": 8, "logit_bias": {"0": 100}},
    {"temperature": 0, "max_tokens": 8, "logit_bias": {"0": 100}, "skip_special_tokens": False},
    {"max_tokens": 0, "echo": True, "prompt": ["ü€", "a"]},
]


@pytest.mark.long(2)
@pytest.mark.parametrize("fields", ASKED, ids=lambda one: ascii(one)[:60])
def test_tokens_begin_where_streams_and_whole_answers_say(app: TestClient, fields: dict[str, Any]) -> None:
    whole = ask(app, logprobs=1, **fields)
    pieces = [] if fields["max_tokens"] == 0 else chunks(app, logprobs=1, **fields)
    for choice in whole["choices"]:
        told, text = choice["logprobs"], choice["text"]
        offsets, tokens = told["text_offset"], told["tokens"]
        assert offsets == sorted(offsets) and len(offsets) == len(tokens)
        assert not offsets or 0 <= offsets[0] <= offsets[-1] <= len(text)
        for offset, token in zip(offsets, tokens, strict=True):
            own = text[offset : offset + len(token)]
            if "\ufffd" in token or (token == END and fields.get("skip_special_tokens", True)):
                continue
            assert own == token or (choice["finish_reason"] == "stop" and token.startswith(own)), (offset, token)
        own = [one for chunk in pieces for one in chunk["choices"] if one["index"] == choice["index"]]
        if own:
            assert streamed([*pieces], choice["index"]) == text
            assert [one for part in own for one in part["logprobs"]["text_offset"]] == offsets
            assert [one for part in own for one in part["logprobs"]["tokens"]] == tokens


def test_all_parts_of_a_character_begin_with_it(app: TestClient, pair: Pair) -> None:
    fields = {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24, "prompt": "x = "}
    choice = ask(app, logprobs=1, **fields)["choices"][0]
    lengths = [len(pair.tokenizer(one, add_special_tokens=False)["input_ids"]) for one in "äö😀"]
    assert choice["text"] == "äö😀" * 3 and min(lengths) > 1
    places = [place for place in range(9) for _ in range(lengths[place % 3])]
    assert choice["logprobs"]["text_offset"][: len(places)] == places


def test_what_a_stop_string_may_cut_off_is_placed_when_that_is_certain(app: TestClient) -> None:
    """No part of a stream names a place behind the text that it has told by then."""
    fields = {"guided_regex": EMOJI, "temperature": 0, "max_tokens": 24, "stop": ["äö😀äx", "öx"]}
    length = 0
    for piece in chunks(app, logprobs=0, **fields):
        (choice,) = piece["choices"]
        length += len(choice["text"])
        assert all(offset <= length for offset in choice["logprobs"]["text_offset"])
    assert length == 9
