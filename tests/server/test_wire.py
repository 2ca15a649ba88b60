"""What is checked of a body before its fields are."""

import json
import time

import pytest

from polydraft.server.wire.bodies import MOST_VALUES, check_brackets, check_sizes, is_half_text
from polydraft.server.wire.error_answers import Refused


def test_brackets_in_texts_are_text() -> None:
    text = json.dumps({"prompt": '[{\\"' * MOST_VALUES, "n": [1]}).encode()
    check_brackets(text)
    for more in (b'[{"a": "[' * MOST_VALUES, b"[" * (MOST_VALUES + 1), b'"\\"' + b"{" * 10, b'"' * 9 + b"\\"):
        if more.count(b"{") < MOST_VALUES and more.count(b"[") < MOST_VALUES:
            check_brackets(more)
        else:
            with pytest.raises(Refused):
                check_brackets(more.replace(b'"a": "[', b'"a": ""'))


@pytest.mark.long(2)
@pytest.mark.parametrize("body", [b"[" * 4_000_000, b'"' + b"[" * 4_000_000, b'"[\\' * 1_300_000, b'["' * 2_000_000])
def test_brackets_are_counted_in_no_time(body: bytes) -> None:
    begun = time.monotonic()
    try:
        check_brackets(body)
    except Refused as error:
        assert error.status == 400
    assert time.monotonic() - begun < 2


def test_rows_of_tokens_are_no_longer_than_a_text() -> None:
    check_sizes({"prompt": [[1] * 100] * 128, "tokens": [1] * 100}, 100)
    check_sizes({"prompt": [1] * 101}, None)
    for body in ({"prompt": [1] * 101}, {"prompt": [[1], [1] * 101]}, {"tokens": [1] * 101}):
        with pytest.raises(Refused, match="101 tokens") as found:
            check_sizes(body, 100)
        assert found.value.param in body and found.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "value", [["a"] * MOST_VALUES, {str(one): 1 for one in range(MOST_VALUES)}, [[1, "a"]] * 50_000]
)
def test_what_no_request_needs_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(Refused) as found:
        check_sizes({"prompt": "a", "\ud800": value}, 100)
    assert found.value.param == "\\ud800" and found.value.message.endswith(".")
    check_sizes({"metadata": [["a"] * 100] * 900}, 100)


def test_halves_of_characters_are_found_wherever_they_are() -> None:
    assert is_half_text([{"a": [1, {"\udfff": 1}]}]) and is_half_text(["a", "\ud800"])
    assert not is_half_text([{"a": ["ü", "\U0001f600", 1, None, [1, 2]]}])
