"""Stores on disk: one format, what is refused, growth within a bound, several writers, and writers that are killed."""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.drafters import StoreVocabulary, StoreWriter, SuffixStore, TextStore, flush_stores
from polydraft.drafters.text.index import SENTINEL, as_tokens
from polydraft.drafters.text.stores import folder as folders
from polydraft.drafters.text.stores import segment as segments
from polydraft.drafters.text.stores import suffix_store
from polydraft.drafters.text.stores.segment import HEADER, Segment, joined, write_segment
from polydraft.errors import InvalidParameter, StoreError, VocabularyMismatch

OURS = StoreVocabulary(1000, b"m" * 32, "ours")
NOISE = np.random.default_rng(0)


def some_texts(count: int, size: int = 50) -> list[list[int]]:
    return [NOISE.integers(0, 1000, size).tolist() for _ in range(count)]


def texts_of(store: Any) -> list[list[int]]:
    """Return all texts in a store's segments, in order."""
    found = list[list[int]]()
    for one in store.segments:
        ends = np.flatnonzero(one.tokens == SENTINEL)
        found += [one.tokens[a + 1 : b].tolist() for a, b in pairwise(ends)]
    return found


def written(folder: Path, texts: list[list[int]], vocabulary: StoreVocabulary = OURS) -> Path:
    with StoreWriter(folder, vocabulary) as writer:
        for text in texts:
            writer.add(text)
    return next(folder.glob("*.segment"))


def occurs(store: Any, context: list[int]) -> int:
    """Return how often the whole context occurs in a store."""
    found = store.found(as_tokens(np.array(context)))
    return sum(one.counts[len(context)] for one in found if len(one.counts) > len(context))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    texts = some_texts(5)
    written(tmp_path / "store", [*texts, [7], []])
    store = TextStore(tmp_path / "store")
    assert texts_of(store) == texts and (store.texts, store.tokens) == (5, 250)
    assert store.vocabulary == OURS and store.size == HEADER.size + 8 * 256
    assert occurs(store, texts[3][:9]) == 1 and occurs(store, [*texts[3][-2:], texts[4][0]]) == 0
    assert texts_of(TextStore(store.segments[0].path)) == texts, "a single file is a store"


def changed(path: Path, place: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(bytes(content))


def header_of(path: Path, **_: Any) -> list[Any]:
    return list(HEADER.unpack(path.read_bytes()[: HEADER.size]))


def of_version_two(path: Path) -> None:
    told = header_of(path)
    told[1] = 2
    changed(path, 0, HEADER.pack(*told))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (lambda path: path.write_bytes(b"PK\3\4 something else"), "is no store of texts: it does not begin as"),
    "empty": (lambda path: path.write_bytes(b""), "is no store of texts"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:100]), "is cut short: it has 100 bytes"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is cut short or damaged: it has .* instead of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"1234"), "is cut short or damaged"),
    "another version": (of_version_two, "is a store of version 2, and this polydraft reads version 1"),
    "a changed header": (lambda path: changed(path, 12, b"\7"), "its header does not agree with its checksum"),
    "changed contents": (lambda path: changed(path, HEADER.size + 80, b"\7\7\7\7"), "its checksum is not that of its"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [TextStore, SuffixStore])
def test_a_damaged_file_is_named_in_one_sentence(kind: Callable[[Path], object], damage: str, tmp_path: Path) -> None:
    path = written(tmp_path / "store", some_texts(3))
    act, says = DAMAGE[damage]
    act(path)
    with pytest.raises(StoreError, match=says) as caught:
        kind(tmp_path / "store")
    assert str(path) in str(caught.value) and str(caught.value).count(". ") == 0


def test_large_files_are_checked_when_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "store", some_texts(3))
    changed(path, HEADER.size + 80, b"\7\7\7\7")
    monkeypatch.setattr(segments, "CHECKED", 100)
    store = TextStore(tmp_path / "store")
    with pytest.raises(StoreError, match="is damaged"):
        store.segments[0].check()


def test_places_that_are_no_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no store of texts at .*; `polydraft store build` makes one"):
        TextStore(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    for kind in (TextStore, SuffixStore):
        with pytest.raises(StoreError, match=r"is no store of texts: it holds notes.txt and no segment"):
            kind(tmp_path)
    with pytest.raises(StoreError, match="is a file; a store of texts is a folder"):
        SuffixStore(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match="is no store of texts"):
        TextStore(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="is empty"):
        TextStore(tmp_path / "empty")
    for bound in (10, True):
        with pytest.raises(InvalidParameter, match="most_bytes must be a whole number"):
            SuffixStore(tmp_path / "new", most_bytes=bound)


def test_another_tokenizer_is_refused_by_both_names(tmp_path: Path) -> None:
    written(tmp_path / "store", some_texts(1))
    for attempt in (
        lambda: TextStore(tmp_path / "store").check(THEIRS),
        lambda: SuffixStore(tmp_path / "store").check(THEIRS),
        lambda: SuffixStore(tmp_path / "store", vocabulary=THEIRS),
        lambda: StoreWriter(tmp_path / "store", THEIRS),
    ):
        with pytest.raises(VocabularyMismatch, match=r"holds tokens of ours \(1000 tokens\), and .* theirs \(1000"):
            attempt()
    assert OURS.agrees(StoreVocabulary(1128)) and not OURS.agrees(StoreVocabulary(5000)), (
        "by size where nothing else is known"
    )
    assert StoreVocabulary(0).agrees(OURS) and StoreVocabulary(0).with_known(OURS) == OURS


THEIRS = StoreVocabulary(1000, b"t" * 32, "theirs")


def test_two_writers_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    ours, theirs = SuffixStore(tmp_path / "store"), SuffixStore(tmp_path / "store")
    writer = StoreWriter(tmp_path / "store", THEIRS)
    ours.check(OURS)
    theirs.check(THEIRS)  # both found an empty folder
    ours.add([1, 2, 3])
    ours.flush()
    theirs.add([4, 5, 6])
    says = r"store holds tokens of ours \(1000 tokens\), and the target's are those of theirs \(1000 tokens\)"
    with pytest.warns(RuntimeWarning) as said:
        theirs.flush()
        theirs.add([4, 5, 6])
        theirs.flush()
    assert len(said) == 2 and re.search(f"cannot be written .*{says}.*texts are not kept", str(said[0].message))
    assert "It is left out" in str(said[1].message)
    writer.add([7, 8, 9])
    with pytest.raises(VocabularyMismatch, match=says):
        writer.flush()
    assert texts_of(TextStore(tmp_path / "store")) == [[1, 2, 3]]
    with pytest.raises(VocabularyMismatch, match=says):
        SuffixStore(tmp_path / "store").check(THEIRS)


def test_a_store_that_was_empty_sees_another_ones_tokens_when_it_begins(tmp_path: Path) -> None:
    ours, theirs = SuffixStore(tmp_path / "store"), SuffixStore(tmp_path / "store")
    ours.check(OURS)
    ours.add([1, 2, 3])
    ours.flush()
    with pytest.raises(VocabularyMismatch, match="holds tokens of ours"):
        theirs.check(THEIRS)


def test_segments_of_different_tokenizers_are_not_merged(tmp_path: Path) -> None:
    """As a folder has them that was filled before writers compared."""
    whose = [OURS, OURS, StoreVocabulary(1000), THEIRS, THEIRS, THEIRS, OURS, OURS]
    for number, vocabulary in enumerate(whose, start=1):
        own = joined([np.array([number, 2, 3])])
        write_segment(tmp_path / f"{number:010d}-{number:010d}.segment", own, 1, vocabulary)
    folders.tidy(tmp_path, None)
    found = [Segment.open(path) for path in sorted(tmp_path.glob("*.segment"))]
    assert [one.texts for one in found] == [3, 3, 2]
    assert [one.vocabulary for one in found] == [OURS, THEIRS, OURS]


def test_a_suffix_store_survives_and_is_searched_before_it_is_written(tmp_path: Path) -> None:
    texts = some_texts(4)
    with SuffixStore(tmp_path / "store", vocabulary=OURS) as store:
        for text in texts:
            store.add(text)
        store.add([5])
        assert store.texts == 4 and not store.segments
        assert occurs(store, texts[2][10:20]) == 1
    again = SuffixStore(tmp_path / "store")
    assert texts_of(again) == texts and again.vocabulary == OURS
    assert occurs(again, texts[2][10:20]) == 1
    again.add(texts[2])
    assert occurs(again, texts[2][10:20]) == 2


@pytest.mark.slow
def test_what_is_not_written_is_written_at_the_end(tmp_path: Path) -> None:
    code = f"from polydraft.drafters import SuffixStore; SuffixStore({str(tmp_path / 'store')!r}).add([1, 2, 3])"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert texts_of(TextStore(tmp_path / "store")) == [[1, 2, 3]]


def test_all_open_stores_are_written_at_once(tmp_path: Path) -> None:
    stores = [SuffixStore(tmp_path / name) for name in "ab"]
    for number, store in enumerate(stores):
        store.add([number, 2, 3])
    flush_stores()
    assert [texts_of(TextStore(tmp_path / name)) for name in "ab"] == [[[0, 2, 3]], [[1, 2, 3]]]
    flush_stores()
    assert [len(store.segments) for store in stores] == [1, 1], "there is nothing left to write"


def test_texts_are_written_when_there_are_enough_or_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SuffixStore(tmp_path / "store")
    store.add(list(range(100)))
    assert not store.segments
    store.add(NOISE.integers(0, 1000, suffix_store.FLUSHED))
    assert len(store.segments) == 1 and store.texts == 2
    monkeypatch.setattr(suffix_store, "LATEST", 0.0)
    store.add([1, 2, 3])
    store.add([4, 5, 6])
    assert len(store.segments) >= 2 and store.texts == 4


def test_small_segments_are_merged_and_their_number_stays_small(tmp_path: Path) -> None:
    store, texts = SuffixStore(tmp_path / "store", vocabulary=OURS), some_texts(150)
    most = 0
    for text in texts:
        store.add(text)
        store.flush()
        most = max(most, len(store.segments))
    assert texts_of(store) == texts, "nothing is lost, and the order by age stays"
    assert most <= 3 * 5 and len(store.segments) <= 3 * 5
    assert all(occurs(store, text[:20]) == 1 for text in texts[::10])
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {".lock", "bound.json", *(one.path.name for one in store.segments)}


def test_the_oldest_are_dropped_within_the_bound(tmp_path: Path) -> None:
    bound = 1_000_000
    store, texts = SuffixStore(tmp_path / "store", most_bytes=bound), some_texts(400, 500)
    for number, text in enumerate(texts):
        store.add(text)
        if number % 10 == 9:
            store.flush()
            assert sum(path.stat().st_size for path in (tmp_path / "store").iterdir()) <= bound
    kept = texts_of(store)
    assert kept == texts[-len(kept) :] and 0.7 * bound < store.size <= bound
    assert len(store.segments) < 30
    assert occurs(store, texts[0][:20]) == 0 and occurs(store, texts[-1][:20]) == 1


def test_one_text_beyond_the_bound_is_kept_alone(tmp_path: Path) -> None:
    store = SuffixStore(tmp_path / "store", most_bytes=1_000_000)
    for size in (100, 200_000):
        store.add(NOISE.integers(0, 1000, size))
        store.flush()
    assert [one.count for one in store.segments] == [200_000]


def test_what_others_write_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_store, "RESCAN", 0.0)
    ours, theirs = SuffixStore(tmp_path / "store"), SuffixStore(tmp_path / "store")
    theirs.add([1, 2, 3, 4])
    assert occurs(ours, [2, 3]) == 0
    theirs.flush()
    time.sleep(0.01)
    assert occurs(ours, [2, 3]) == 1
    for number in range(12):  # their merging takes files away that we have mapped
        theirs.add([number, 2, 3])
        theirs.flush()
        ours.add([number + 50, 2, 3])
        ours.flush()
    assert occurs(ours, [2, 3]) == 25


def test_a_full_disk_is_told_once_and_costs_only_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SuffixStore(tmp_path / "store")
    store.add([1, 2, 3, 4])
    store.flush()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "fsync", full)
        store.add([5, 6, 7])
        with pytest.warns(RuntimeWarning, match=r"cannot be written \(No space left on device\); texts are not kept"):
            store.flush()
        store.add([8, 9, 10])
        store.flush()  # warnings are errors: a second one would be seen
    assert occurs(store, [2, 3]) == 1 and store.texts == 1
    assert {path.suffix for path in (tmp_path / "store").iterdir()} == {".segment", ".json", ""}, "nothing half written"
    store.add([8, 9, 10])
    store.flush()
    assert occurs(store, [9, 10]) == 1, "it goes on when there is room again"


def raising(number: int) -> Callable[..., Any]:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_the_folder_costs_only_texts(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", raising(number))
        with pytest.warns(RuntimeWarning, match=rf"written \({os.strerror(number)}\); texts are not kept") as said:
            store = SuffixStore(tmp_path / "far" / "store")
            store.add([1, 2, 3])
            assert occurs(store, [1, 2]) == 1
            store.flush()
        assert len(said) == 1 and store.texts == 0
    store.add([4, 5, 6])
    store.flush()
    assert texts_of(store) == [[4, 5, 6]], "it goes on when there is room"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_folder_that_cannot_be_made_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", raising(number))
    with pytest.raises(StoreError, match=r"cannot be used|is a file"):
        SuffixStore(tmp_path / "store")


def test_a_disk_without_room_for_a_folder_that_is_filled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", raising(errno.ENOSPC))
    with pytest.raises(StoreError, match="cannot be used: No space left on device"):
        StoreWriter(tmp_path / "store", OURS)


def test_a_merge_without_room_costs_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writer = SuffixStore(tmp_path / "store"), StoreWriter(tmp_path / "other", OURS, merges=True)
    monkeypatch.setattr(folders, "place_segment", raising(errno.ENOSPC))
    says = r"cannot be merged \(No space left on device\); its texts are kept\.$"
    with pytest.warns(RuntimeWarning, match=says) as said:
        for number in range(6):
            store.add([number, 2, 3])
            store.flush()
    assert len(said) == 1 and store.texts == len(store.segments) == 6
    with pytest.warns(RuntimeWarning, match=says):
        for number in range(4):
            writer.add([number, 2, 3])
            writer.flush()
    assert TextStore(tmp_path / "other").texts == 4
    monkeypatch.undo()
    store.add([6, 2, 3])
    store.flush()
    assert store.texts == 7 and len(store.segments) == 1


def test_a_damaged_neighbour_stops_merging_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_store, "RESCAN", 0.0)
    store = SuffixStore(tmp_path / "store")
    for number in range(9):
        store.add([number, number + 1, number + 2])
        if number == 1:
            changed(next((tmp_path / "store").glob("*.segment")), HEADER.size, b"\7\7\7\7")
        store.flush()
    assert len(store.segments) == 9
    with pytest.raises(StoreError, match="is damaged"):
        SuffixStore(tmp_path / "store")
    fresh = SuffixStore(tmp_path / "fresh")
    (tmp_path / "fresh" / "0000000001-0000000001.segment").write_bytes(b"nonsense")
    with pytest.warns(RuntimeWarning, match="is no store of texts: it does not begin as one. It is left out"):
        fresh.found(as_tokens(np.array([1, 2])))


def test_what_a_merge_replaced_is_ignored_and_cleaned(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    for name, text in {"0000000001-0000000001": [1, 2], "0000000002-0000000002": [3, 4]}.items():
        write_segment(folder / f"{name}.segment", joined([np.array(text)]), 1, OURS)
    whole = joined([np.array([1, 2]), np.array([3, 4])])
    write_segment(folder / "0000000001-0000000002.segment", whole, 2, OURS)
    (folder / "0000000003-0000000003.segment.99.half").write_bytes(b"x")
    store = SuffixStore(folder)
    assert texts_of(store) == [[1, 2], [3, 4]]
    store.add([5, 6])
    store.flush()
    assert texts_of(store) == [[1, 2], [3, 4], [5, 6]]
    assert {path.name for path in folder.iterdir() if path.suffix != ".segment"} == {".lock", "bound.json"}
    assert len(store.segments) == len([*folder.glob("*.segment")]) == 2


def test_a_lock_that_is_held_costs_texts_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(folders, "PATIENCE", 0.05)
    store = SuffixStore(tmp_path / "store")
    store.add([1, 2, 3])
    with FileLock(tmp_path / "store" / ".lock"), pytest.warns(RuntimeWarning, match="cannot be written"):
        store.flush()


WRITER = """
import sys
import numpy as np
from polydraft.drafters import SuffixStore
from polydraft.drafters.text.stores import suffix_store
suffix_store.FLUSHED = int(sys.argv[3])
store = SuffixStore(sys.argv[1], most_bytes=int(sys.argv[4]))
print("ready", flush=True)
noise = np.random.default_rng(int(sys.argv[2]))
for number in range(int(sys.argv[5])):
    text = noise.integers(0, 1000, noise.integers(50, 200))
    text[0], text[1] = int(sys.argv[2]), number
    store.add(text)
store.close()
"""


def writer(folder: Path, name: int, *, flushed: int, bound: int, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, *map(str, (folder, name, flushed, bound, count))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_write_and_both_are_kept(tmp_path: Path) -> None:
    both = [writer(tmp_path, name, flushed=500, bound=10**9, count=20) for name in (3, 4)]
    assert [one.wait(120) for one in both] == [0, 0]
    found = {tuple(text[:2]) for text in texts_of(TextStore(tmp_path))}
    assert found == {(name, number) for name in (3, 4) for number in range(20)}
    for one in both:
        one.stdout.close()


KILLER = """
import os, random, signal, sys, time
chance = random.Random(0)
for round in range(20):
    child = os.fork()
    if not child:
        sys.argv[2] = str(round)
        exec(WRITER)
        os._exit(0)
    time.sleep(chance.uniform(0.05, 1.0))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = SuffixStore(sys.argv[1], most_bytes=int(sys.argv[4]))  # compares all checksums
    print(round, store.texts, store.size, len(store.segments), flush=True)
"""


@pytest.mark.slow
def test_killed_writers_damage_nothing(tmp_path: Path) -> None:
    code = f"from polydraft.drafters import SuffixStore\nWRITER = {WRITER!r}\n{KILLER}"
    arguments = [tmp_path, 0, 1000, 1_500_000, 10**6]  # a segment for each thousand tokens
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    rounds = [line for line in done.stdout.splitlines() if line != "ready"]
    assert len(rounds) == 20
    store = SuffixStore(tmp_path)
    texts = texts_of(store)
    assert texts and all(50 <= len(text) < 200 and text[0] < 20 for text in texts)
    names = [tuple(text[:2]) for text in texts]
    assert len({*names}) == len(names), "no text is there twice"
    assert names == sorted(names) and names[-1][0] > 15, "the order by age stays, and the last writers' texts are there"
    store.add([1, 2, 3])
    store.flush()
    assert store.size <= 1_500_000 + 20_000 and len(store.segments) < 30
    assert not [*tmp_path.glob("*.half")]


def test_forks_leave_their_parents_texts_to_them(tmp_path: Path) -> None:
    store = SuffixStore(tmp_path / "store")
    store.add([1, 2, 3])
    store._buffer.process = -1  # as if we were a fork
    store.flush()
    assert not [*(tmp_path / "store").glob("*.segment")]
    store.add([4, 5, 6])
    store.flush()
    assert texts_of(store) == [[4, 5, 6]]


def test_a_file_is_open_for_as_long_as_it_is_searched(tmp_path: Path) -> None:
    path = written(tmp_path / "store", some_texts(2))
    one = Segment.open(path)
    path.unlink()
    assert one.found(as_tokens(one.tokens[1:5]), 8).counts[4] == 1


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "wrong", [[-1, 2], [1.5, 2.0], [[1, 2], [3, 4]], [[1], [2, 3]], "text", [1 << 32, 1], [0xFFFFFFFF, 1]]
)
def test_texts_that_are_no_token_ids_are_refused(tmp_path: Path, wrong: Any) -> None:
    with SuffixStore(tmp_path) as store, pytest.raises(InvalidParameter, match="takes the token ids of one text"):
        store.add(wrong)
    with pytest.raises(InvalidParameter, match="takes the token ids of one text"):
        StoreWriter(tmp_path, StoreVocabulary(9)).add(wrong)
