"""The pool of n-grams against lists written the slow and plain way, and its files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft.drafters import NgramPool, StoreVocabulary
from polydraft.errors import CheckpointError, InvalidParameter, VocabularyMismatch

phrases = st.tuples(st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 1)))


def lists(pool: NgramPool) -> dict[int, list[tuple[int, ...]]]:
    return {key: [one.tokens for one in entries] for key, entries in pool.entries.items()}


def numbers(pool: NgramPool, key: int) -> list[int]:
    return [one.number for one in pool.entries[key]]


@given(added=st.lists(phrases, max_size=40), most=st.integers(1, 4))
def test_adding_moves_to_the_end_and_drops_the_oldest(added: list, most: int) -> None:
    pool, slow, named = NgramPool(3, most), dict[int, list[tuple[int, ...]]](), dict[int, tuple[int, tuple]]()
    for key, tokens in added:
        before = lists(pool)
        after = pool.added([(key, tokens)])
        assert lists(pool) == before, "a pool is a value"
        pool = after
        own = slow.setdefault(key, [])
        if tokens in own:
            own.remove(tokens)
        own.append(tokens)
        del own[:-most]
        assert lists(pool) == slow
        for one in pool.entries[key]:
            assert named.setdefault(one.number, (key, one.tokens)) == (key, one.tokens), "a number is never given twice"
    assert lists(NgramPool(3, most).added(added)) == slow
    assert len(pool) == sum(map(len, slow.values()))


def test_the_newest_come_first() -> None:
    pool = NgramPool(3, 3).added([(1, (2, 3)), (1, (4, 5)), (1, (6, 7)), (1, (4, 5))])
    assert [one.tokens for one in pool.of(1)] == [(4, 5), (6, 7), (2, 3)]
    assert [one.tokens for one in pool.of(1, 2)] == [(4, 5), (6, 7)]
    assert pool.of(9) == () and pool.of(1, 0) == ()


def test_entries_are_refined_by_their_numbers_wherever_they_stand_by_then() -> None:
    """The official code overwrites the last places of the list, where others may stand."""
    pool = NgramPool(3, 4).added([(1, (2, 2)), (1, (3, 3))])
    asked = {one.tokens: one.number for one in pool.of(1)}
    later = pool.added([(1, (4, 4)), (1, (2, 2))])
    refined = later.refined(1, {asked[2, 2]: (8, 8), asked[3, 3]: (9, 9)})
    assert lists(refined) == {1: [(9, 9), (4, 4), (8, 8)]}
    assert numbers(refined, 1) == numbers(later, 1)
    assert lists(later) == {1: [(3, 3), (4, 4), (2, 2)]}


def test_what_has_left_the_pool_is_not_refined() -> None:
    pool = NgramPool(3, 1).added([(1, (2, 2))])
    (gone,) = pool.of(1)
    later = pool.added([(1, (3, 3))])
    assert lists(later.refined(1, {gone.number: (8, 8)})) == {1: [(3, 3)]}
    assert lists(NgramPool(3, 1).refined(5, {0: (1, 1)})) == {}


def test_of_entries_that_become_alike_the_newest_stays() -> None:
    pool = NgramPool(3, 4).added([(1, (2, 2)), (1, (3, 3)), (1, (4, 4))])
    first, second, third = numbers(pool, 1)
    refined = pool.refined(1, {first: (4, 4), second: (5, 5)})
    assert lists(refined) == {1: [(5, 5), (4, 4)]} and numbers(refined, 1) == [second, third]


@given(added=st.lists(phrases, max_size=20))
def test_a_file_holds_the_whole_pool(added: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pool") / "pool.npz"
    pool = NgramPool(3, 3).added(added)
    pool.save(path)
    again = NgramPool.load(path)
    assert (again.level, again.most, again.following) == (pool.level, pool.most, pool.following)
    assert {**again.entries} == {**pool.entries}
    assert lists(again.added([(0, (7, 7))])) == lists(pool.added([(0, (7, 7))]))
    assert [one.name for one in path.parent.iterdir()] == ["pool.npz"]


@pytest.mark.parametrize(
    "known", [None, StoreVocabulary(7), StoreVocabulary(9, bytes(range(32)), "a näme"), StoreVocabulary(0, b"m")]
)
def test_a_file_says_whose_tokens_it_holds(known: StoreVocabulary | None, tmp_path: Path) -> None:
    pool = NgramPool(3, 3, vocabulary=known).added([(1, (2, 3))])
    pool.save(tmp_path / "pool")
    again = NgramPool.load(tmp_path / "pool")
    assert again.vocabulary == known and again.digest == pool.digest
    again.check(known or StoreVocabulary(5000))
    if known and known.mark:
        with pytest.raises(VocabularyMismatch, match="leave it out, or save one of this model"):
            again.check(replace(known, mark=b"other", name="other"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool.npz"
    NgramPool(3, 3).added([(1, (2, 3))]).save(path)
    before = path.read_bytes()

    def full(file: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InvalidParameter, match="pool cannot be written there: No space left"):
        NgramPool(3, 3).save(path)
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 1


HEAD, ROWS = [1, 3, 2, 9], {"keys": [1, 1], "numbers": [0, 4], "tokens": [[2, 3], [4, 5]]}
DAMAGED: dict[str, dict[str, object]] = {
    "another form": {"head": [2, 3, 2, 9]},
    "a short head": {"head": [1, 3, 2]},
    "level 1": {"head": [1, 1, 2, 9]},
    "no room": {"head": [1, 3, 0, 9]},
    "too many of a key": {"head": [1, 3, 1, 9]},
    "a number out of range": {"head": [1, 3, 2, 4]},
    "numbers twice": {"numbers": [4, 4]},
    "entries twice": {"tokens": [[2, 3], [2, 3]]},
    "other lengths": {"keys": [1]},
    "short phrases": {"tokens": [[2], [4]]},
    "a negative token": {"tokens": [[2, 3], [4, -5]]},
    "no integers": {"tokens": [[2.0, 3.0], [4.0, 5.0]]},
    "a single key": {"keys": 1},
    "a short vocabulary": {"vocabulary": [9]},
    "a vocabulary with a short mark": {"vocabulary": [9, 4, 1, 2, 3]},
    "a vocabulary of no bytes": {"vocabulary": [9, 1, 256]},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=[*DAMAGED])
def test_damaged_files_are_refused(damage: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "pool.npz"
    whole = {"head": HEAD, **ROWS}
    np.savez(path, **{name: np.array(value) for name, value in whole.items()})
    assert lists(NgramPool.load(path)) == {1: [(2, 3), (4, 5)]}
    np.savez(path, **{name: np.array(value) for name, value in {**whole, **damage}.items()})
    with pytest.raises(CheckpointError, match=r"no pool of n-grams that this version reads|is damaged"):
        NgramPool.load(path)


def test_what_is_no_pool_at_all(tmp_path: Path) -> None:
    path = tmp_path / "pool.npz"
    with pytest.raises(CheckpointError, match="no such file"):
        NgramPool.load(path)
    for content in (b"", b"nothing", b"PK\x03\x04 half a file"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged, or no pool"):
            NgramPool.load(path)
    np.savez(path, head=np.array(HEAD))
    with pytest.raises(CheckpointError, match="damaged, or no pool"):
        NgramPool.load(path)
    np.savez(path, **{name: np.array([object()], dtype=object) for name in ("head", "keys", "numbers", "tokens")})
    with pytest.raises(CheckpointError, match="damaged, or no pool"):
        NgramPool.load(path)  # which would run what its maker pickled


@pytest.mark.long(2)
@pytest.mark.parametrize("flip", [0x01, 0x08, 0x80, 0xFF])
def test_every_changed_byte_is_one_error_or_none(flip: int, tmp_path: Path) -> None:
    """Zip files and arrays raise many kinds of errors, of which some name a password or a kind of compression."""
    path = tmp_path / "pool.npz"
    pool = NgramPool(2, 2, vocabulary=StoreVocabulary(3, b"m", "n")).added([(1, (2,)), (3, (4,))])
    pool.save(path)
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        try:
            assert lists(NgramPool.load(path)) == lists(pool)
        except CheckpointError:
            refused += 1
    assert len(whole) // 2 < refused < len(whole)


@pytest.mark.parametrize("numbers", [(1, 1), (2, 0), (-2, 1)])
def test_bad_sizes(numbers: tuple[int, int]) -> None:
    with pytest.raises(InvalidParameter, match="at least 2 tokens and 1 per key"):
        NgramPool(*numbers)


def test_phrases_of_another_length() -> None:
    pool = NgramPool(3, 2)
    with pytest.raises(InvalidParameter, match="has 2 tokens behind its key, but this one has 1"):
        pool.added([(1, (2,))])
    with pytest.raises(InvalidParameter, match="but this one has 3"):
        pool.refined(1, {0: (2, 3, 4)})
