"""The bound of a store: kept by its folder, held to by all, and none for a store that is only read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import tiny_model

import polydraft
from polydraft.drafters import RetrievalDrafter, StoreVocabulary, StoreWriter, SuffixDrafter, SuffixStore, TextStore
from polydraft.drafters.text.index import as_tokens
from polydraft.drafters.text.stores import folder as bounds
from polydraft.drafters.text.stores.folder import BOUND, Bound, keep_bound, read_bound
from polydraft.errors import StoreError

OURS = StoreVocabulary(1000, b"m" * 32, "ours")
NOISE = np.random.default_rng(0)


def some_text(size: int = 5000) -> np.ndarray:
    return NOISE.integers(0, 1000, size)


def built(folder: Path, count: int = 10, **options: Any) -> Path:
    """Fill a folder with as many segments of 40 kB."""
    with StoreWriter(folder, OURS, chunk=5002, **options) as writer:
        for _ in range(count):
            writer.add(some_text())
    return folder


def from_before(folder: Path) -> Path:
    (folder / BOUND).unlink()
    return folder


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> int:
    """A usual bound that is small."""
    monkeypatch.setattr(bounds, "MOST_BYTES", 100_000)
    return 100_000


def test_a_store_that_was_built_larger_stays_large(tmp_path: Path, usual: int) -> None:
    folder = built(tmp_path / "store", most_bytes=1_000_000)
    before = TextStore(folder).size
    assert before > 4 * usual
    store = SuffixStore(folder)
    assert store.most_bytes == 1_000_000
    store.add(some_text())
    store.flush()
    assert store.size > before and TextStore(folder).texts == 11


def test_a_folder_keeps_the_bound_that_somebody_named(tmp_path: Path, usual: int) -> None:
    folder = tmp_path / "store"
    store = SuffixStore(folder)
    assert store.most_bytes == usual and read_bound(folder) is None, "nothing is written before there is a text"
    for named, holds in ((None, usual), (2_000_000, 2_000_000), (None, 2_000_000), (3_000_000, 3_000_000)):
        with SuffixStore(folder, most_bytes=named) as store:
            assert store.most_bytes == holds
            store.add([1, 2, 3])
        assert read_bound(folder) == Bound(holds) and TextStore(folder).most_bytes == holds
    with StoreWriter(folder, StoreVocabulary(0), merges=True) as writer:
        writer.add([1, 2, 3])
    assert read_bound(folder) == Bound(3_000_000)


def test_another_ones_new_bound_holds_from_the_next_text_on(tmp_path: Path) -> None:
    ours, theirs = SuffixStore(tmp_path / "store"), SuffixStore(tmp_path / "store", most_bytes=1_000_000)
    theirs.add([1, 2, 3])
    theirs.flush()
    for _ in range(10):
        ours.add(some_text(20_000))
        ours.flush()
    assert ours.size <= 1_000_000 < 10 * 8 * 20_000


def test_a_folder_from_before_never_becomes_smaller_than_it_was_found(tmp_path: Path, usual: int) -> None:
    folder = from_before(built(tmp_path / "store", most_bytes=10_000_000))
    found = TextStore(folder).size
    store, sizes = SuffixStore(folder), list[int]()
    assert found > 4 * usual and store.most_bytes == 2 * found
    for _ in range(30):
        store.add(some_text())
        store.flush()
        sizes.append(store.size)
    assert min(sizes) >= found and max(sizes) <= 2 * found < 40 * 8 * 5000, "it is bounded all the same"


def test_a_store_that_is_only_read_is_left_as_it_is(tmp_path: Path, usual: int) -> None:
    folder = built(tmp_path / "corpus")
    before = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    store = SuffixStore(folder)
    assert store.most_bytes is None and len(store.segments) == 10 and store.size > usual
    with pytest.warns(RuntimeWarning, match=r"corpus was built to be only read; no texts are added to it\.$"):
        store.add([1, 2, 3])
    store.add([1, 2, 3])  # warnings are errors: a second one would be seen
    store.flush()
    text = store.segments[0].tokens[1:20]
    assert store.texts == 10 and max(len(one.counts) for one in store.found(as_tokens(text))) > 19
    assert sorted((path.name, path.stat().st_size) for path in folder.iterdir()) == before
    for attempt in (
        lambda: SuffixStore(folder, most_bytes=1_000_000),
        lambda: StoreWriter(folder, OURS, merges=True),
        lambda: StoreWriter(folder, OURS, most_bytes=1_000_000),
    ):
        with pytest.raises(StoreError, match="was built to be only read, and takes no texts: name another folder"):
            attempt()
    built(folder, 1)
    assert TextStore(folder).texts == 11, "whoever fills it may go on"


def test_drafters_read_a_store_that_is_only_read(tmp_path: Path) -> None:
    import torch

    model, ids = tiny_model(), torch.tensor([[1, 2, 3]])
    plain = polydraft.generate(model, ids, drafter="none", max_new_tokens=8).sequences
    with StoreWriter(tmp_path / "corpus", StoreVocabulary(24)) as writer:
        writer.add(plain[0].numpy())
    found = polydraft.generate(model, ids, drafter=RetrievalDrafter(tmp_path / "corpus"), max_new_tokens=8)
    assert torch.equal(found.sequences, plain) and found.statistics.accepted > 0
    quiet = SuffixDrafter(store=tmp_path / "corpus", keeps=False)
    found = polydraft.generate(model, ids, drafter=quiet, max_new_tokens=8)
    assert torch.equal(found.sequences, plain) and found.statistics.accepted > 0
    with pytest.warns(RuntimeWarning, match="only read"):
        polydraft.generate(model, ids, drafter=f"suffix:{tmp_path / 'corpus'}", max_new_tokens=8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged: it does not say"),
        (b"[1]", "is damaged: it does not say"),
        (b'{"version": 1}', "is damaged: it does not say"),
        (b"\xff\xfe", "is damaged: it does not say"),
        (b'{"version": 2, "most_bytes": 5, "checksum": 1}', "is of version 2, and this polydraft reads version 1"),
        (b'{"version": 1, "most_bytes": 5, "checksum": 1}', "is damaged: its checksum"),
        (b'{"version": 1, "most_bytes": true, "checksum": 1}', "is damaged: its checksum"),
    ],
)
def test_a_damaged_bound_is_one_sentence_and_drops_nothing(content: bytes, says: str, tmp_path: Path) -> None:
    folder = built(tmp_path / "store", 2, most_bytes=1_000_000)
    store = SuffixStore(folder)
    (folder / BOUND).write_bytes(content)
    with pytest.raises(StoreError, match=says) as caught:
        SuffixStore(folder)
    assert str(folder / BOUND) in str(caught.value) and "\n" not in str(caught.value)
    store.add([1, 2, 3])
    with pytest.warns(RuntimeWarning, match=f"{says}.*texts are not kept"):
        store.flush()
    assert TextStore(folder).texts == 2, "who only reads needs no bound"


def test_a_bound_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_bound(tmp_path, Bound(5))
    assert json.loads((tmp_path / BOUND).read_text())["most_bytes"] == 5

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bounds.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keep_bound(tmp_path, Bound(6))
    assert read_bound(tmp_path) == Bound(5) and [path.name for path in tmp_path.iterdir()] == [BOUND]
