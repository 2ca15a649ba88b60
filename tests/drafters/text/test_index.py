"""The index of a text that grows, against a scan of the whole text, through whatever may happen to a row."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scanning import scanned

from polydraft.drafters.text.index import (
    ROOM,
    SENTINEL,
    IndexedRows,
    IndexedText,
    Scanned,
    TextIndex,
    Tokens,
    as_tokens,
)
from polydraft.rows import cut, put, select

LONGEST = (1, 3, 64, 100)
Row = NDArray[np.int64]


def same(found: Scanned, row: Row, longest: int) -> bool:
    """Tell whether occurrences are those that a scan of the text finds."""
    own = as_tokens(row)
    slow = scanned(own, len(own) - 1, own, longest)
    assert found.counts == slow.counts and found.tokens.tolist() == slow.tokens.tolist()
    return found.ends.tolist() == slow.ends.tolist() and found.lengths.tolist() == slow.lengths.tolist()


def agrees(own: IndexedText, row: Row) -> bool:
    return all(same(own.occurrences(longest), row, longest) for longest in LONGEST)


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=30), cuts=st.lists(st.integers(1, 30), max_size=5))
def test_every_beginning_of_a_text_is_searched_as_by_a_scan(text: list[int], cuts: list[int]) -> None:
    row, own = np.array(text), IndexedText()
    for size in (*cuts, *range(1, len(text) + 1)):
        own = own.cut(size).to(row[:size])
        assert agrees(own, row[:size])


@pytest.mark.parametrize("block", [1, 7, 63, 64, 65, 130])
def test_repetitions_that_are_longer_than_what_is_kept_of_them(block: int) -> None:
    noise = np.random.default_rng(block)
    one = noise.integers(0, 3, block)
    row = np.concatenate([one, one, [9], one, one[: block // 2], [4_000_000_000], one, one])
    own = IndexedText()
    for size in (*range(1, 40), *range(41, len(row), 13), len(row)):
        own = own.to(row[:size])
        assert agrees(own, row[:size])


@given(data=st.data())
def test_states_of_before_and_texts_that_part_keep_their_own(data: st.DataObject) -> None:
    """Steps are taken again with other tokens, rows are rewound and replaced: every state finds what a scan finds."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    states = [(IndexedText(), np.zeros(0, np.int64))]
    for _ in range(data.draw(st.integers(2, 12))):
        own, row = states[data.draw(st.integers(0, len(states) - 1))]  # any state of before
        length = data.draw(st.integers(0, len(row)))
        row = np.concatenate([row[:length], data.draw(tokens)])
        after = own.cut(length).to(row)
        assert agrees(after, row)
        states.append((after, row))
    for own, row in states[1:]:
        assert agrees(own, row) and agrees(own.to(row), row)


@given(
    parts=st.lists(st.lists(st.sampled_from([0, 1, 2, SENTINEL]), max_size=8), min_size=1, max_size=5),
    context=st.lists(st.integers(0, 3), min_size=1, max_size=9),
)
def test_another_text_is_looked_for_as_by_a_scan(parts: list[list[int]], context: list[int]) -> None:
    index, asked = TextIndex(), as_tokens(np.array(context))
    for part in parts:
        assert index.add(np.array(part, np.uint32))
        every = as_tokens(index.tokens[: len(index)])
        for longest in LONGEST:
            found, slow = index.found(asked, longest), scanned(every, len(every), asked, longest)
            assert found.counts == slow.counts and found.tokens.tolist() == slow.tokens.tolist()
            assert (found.ends.tolist(), found.lengths.tolist()) == (slow.ends.tolist(), slow.lengths.tolist())


@pytest.mark.parametrize("block", [63, 64, 65, 130])
def test_another_text_is_looked_for_in_long_repetitions(block: int) -> None:
    one = np.random.default_rng(block).integers(0, 3, block).astype(np.uint32)
    every = np.concatenate([[SENTINEL], one, one, [9], one[5:], [SENTINEL], one, one[: block // 2]]).astype(np.uint32)
    index = TextIndex(len(every))
    assert index.add(every) and not index.add(every[:1]) and len(index) == len(every)
    for context in (one, np.concatenate([one, one]), one[:-1], one[1:], np.array([9]), np.array([9, *one[5:20]])):
        found, slow = (of(as_tokens(context)) for of in (_indexed(index), _scanned(every)))
        assert found.counts == slow.counts and found.lengths.tolist() == slow.lengths.tolist()
        assert found.ends.tolist() == slow.ends.tolist()


def _indexed(index: TextIndex) -> Callable[[Tokens], Scanned]:
    return lambda context: index.found(context, LONGEST[2])


def _scanned(every: NDArray[np.uint32]) -> Callable[[Tokens], Scanned]:
    return lambda context: scanned(as_tokens(every), len(every), context, LONGEST[2])


def test_an_index_grows_in_place_and_is_read_again_only_where_there_is_no_room() -> None:
    row = np.random.default_rng(0).integers(0, 50, 3 * ROOM)
    own, seen = IndexedText(), dict[int, TextIndex]()
    for size in range(1, len(row) + 1, 16):
        own = own.to(row[:size])
        seen[id(own.index)] = own.index
    assert len(seen) == 3, "the first one, of twice 1024, of twice what did not fit"
    assert agrees(own, row[: own.known])
    before = own.index
    assert own.cut(100).to(row[:200]).index is before, "a text that is cut short is still indexed"
    other = row.copy()
    other[150] = 77
    assert own.cut(140).to(other[:200]).index is not before and agrees(own, row[: own.known])


def test_a_text_that_was_replaced_without_a_word_is_seen_near_its_end() -> None:
    row = np.arange(200) % 7
    own = IndexedText().to(row)
    other = (np.arange(220) + 1) % 7
    assert agrees(own.to(other), other) and agrees(own.to(other[:3]), other[:3])


def test_rows_of_a_batch_have_their_own() -> None:
    first, second, third = np.array([1, 2, 1]), np.array([3, 3, 3, 3]), np.array([5, 6, 5, 6])
    rows = IndexedRows.begun(10, 2).to([first, second])
    newcomer = IndexedRows.begun(10, 1).to([third])
    joined = put(rows, 0, newcomer).to([third, second])
    assert agrees(joined.rows[0], third) and agrees(joined.rows[1], second) and agrees(rows.rows[0], first)
    assert joined.rows[0].index is newcomer.rows[0].index and select(rows, [1]).rows == (rows.rows[1],)
    assert len(put(rows, 2, newcomer).rows) == 3 and cut(rows, 0, 1).rows[0].known == 1
