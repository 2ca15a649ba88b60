"""Targets over several ranks, here on two threads: what rank 0 does with keys and passes, the other one does too."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor

import polydraft
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import RANKS, HuggingFaceModel
from polydraft.models.distributed.mirrored import END, MirroredCache, MirroredModel, follow
from polydraft.models.distributed.parcel import Parcel
from polydraft.models.distributed.splitting import TargetSplit


class Threads:
    """Ranks as threads, over whole copies of one model: each pass is run twice, and all that is done with keys too."""

    count = 2

    def __init__(self, model: Any) -> None:
        self.told, self.passes, self.caches = queue.Queue[Tensor](), 0, dict[int, Any]()
        self.operations = list[int]()
        self._thread = threading.Thread(target=self._follow, args=(model,), daemon=True)
        self._thread.start()

    def _follow(self, model: Any) -> None:
        door = HuggingFaceModel(model, fused=False)
        made = door.new_cache

        def noted(batch: int, capacity: int) -> Any:
            self.caches[len(self.caches)] = made(batch, capacity)
            return self.caches[len(self.caches) - 1]

        door.new_cache = noted
        follow(door, lambda: Parcel.of(self.told.get(timeout=60)))

    @contextmanager
    def together(self) -> Iterator[None]:
        yield

    passing = together

    def tell(self, parcel: Parcel) -> None:
        self.operations.append(parcel.operation)
        self.told.put(parcel.words())

    def end(self) -> None:
        if self._thread.is_alive():
            self.tell(Parcel(END))
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def shared() -> Iterator[tuple[Any, Threads]]:
    model, twin = tiny_model().double(), tiny_model().double()
    twin.load_state_dict(model.state_dict())
    ranks = Threads(twin)
    vars(model)[RANKS] = ranks
    yield model, ranks
    ranks.end()


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "chain": {"policy": 3, "temperature": 1.0, "top_k": 0, "seed": 1},
    "tree": {"policy": "2,2,1", "temperature": 0.8, "seed": 2},
    "planner": {"policy": "auto"},
    "text": {"drafter": "merge"},
}


def test_texts_are_those_of_one_process(shared: tuple[Any, Threads]) -> None:
    model, _ = shared
    alone = tiny_model().double()
    alone.load_state_dict(model.state_dict())
    draft = tiny_model().double()
    prompts = torch.tensor([[0, 5, 9, 9, 4], [3, 5, 9, 2, 5], [0, 0, 7, 9, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    for name, options in CALLS.items():
        given = {"drafter": draft, "attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, **options}
        texts = [polydraft.generate(one, prompts, **given).sequences for one in (model, alone)]
        assert texts[0].equal(texts[1]), name


def test_rows_are_put_viewed_and_dropped_on_both_ranks(shared: tuple[Any, Threads]) -> None:
    model, ranks = shared
    door = MirroredModel(model)
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    places = torch.arange(3).expand(2, 3)
    causal = torch.ones(3, 3, dtype=torch.bool).tril().expand(2, 3, 3)
    whole, single = door.new_cache(2, 8), door.new_cache(1, 8)
    first = door.forward(tokens, places, causal, whole, torch.tensor([0, 0])).logits
    door.forward(tokens[1:], places[1:], causal[1:], single, torch.tensor([0]))
    whole.put(0, single, 3)
    assert first[0].ne(first[1]).any()
    more = whole.put(2, single, 3)
    assert isinstance(more, MirroredCache) and more is not whole
    view = more.select([1, 2])
    view.keep(torch.tensor([0, 0]), torch.tensor([[2], [2]]))
    del view
    door.new_cache(1, 1)  # which tells that the view is gone
    ranks.end()
    for number, cache in enumerate((whole, single)):
        theirs = ranks.caches[number]
        assert all(a.equal(b) for a, b in zip(cache.own.entries, theirs.entries, strict=True))


def test_what_reads_states_is_refused_before_anything_is_told(shared: tuple[Any, Threads]) -> None:
    model, ranks = shared
    door = MirroredModel(model)
    cache, before = door.new_cache(1, 4), len(ranks.operations)
    one, place = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    for given in ({"hidden_layers": (1,)}, {"queries": 1}, {"embeddings": torch.zeros(1, 1, 4)}):
        with pytest.raises(UnsupportedModel, match="lies on 2 ranks"):
            door.forward(one, one, mask, cache, place, **given)
    for ask in (lambda: door.embedded(one), lambda: door.output_rows(place), lambda: door.variant("int8")):
        with pytest.raises(UnsupportedModel, match="take a draft model"):
            ask()
    with pytest.raises(UnsupportedModel, match="4 slots, but 9"):
        door.forward(one, one, torch.ones(1, 1, 9, dtype=torch.bool), cache, place)
    with pytest.raises(InvalidParameter, match="must come from new_cache"):
        door.forward(one, one, mask, cache.own, place)
    with pytest.raises(InvalidParameter, match="not compiled"):
        polydraft.generate(model, one, compile=True)
    assert len(ranks.operations) == before


@pytest.mark.parametrize("sizes", [(0,), (1, 1, 3), (2, 5, 13), (1, 64, 64), (3, 1, 129)])
def test_a_parcel_comes_out_as_it_went_in(sizes: tuple[int, ...]) -> None:
    stream = torch.Generator().manual_seed(0)
    mask = torch.rand(sizes, generator=stream) < 0.5
    numbers = torch.randint(-(2**62), 2**62, sizes, generator=stream)
    sent = Parcel(3, (1, -7, 2**40), (mask, numbers, mask.expand(2, *sizes)))
    words = torch.cat([sent.words(), torch.full((9,), -1)])  # a block is longer than what is in it
    found = Parcel.of(words)
    assert (found.operation, found.numbers) == (3, (1, -7, 2**40))
    assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(found.tensors, sent.tensors, strict=True))


@pytest.mark.parametrize("given", [1, 0, True, 2.0, "two", "mlp:", "mlp:1", "2:mlp", -2, 10**9, None, "1e3"])
def test_a_number_of_ranks_is_two_at_least(given: object) -> None:
    with pytest.raises(InvalidParameter, match="parallel must be a number of ranks from 2"):
        TargetSplit.named(given)
    assert (TargetSplit.named("mlp:3"), TargetSplit.named("2")) == (TargetSplit(3, attention=False), TargetSplit(2))
    assert [str(TargetSplit.named(one)) for one in ("mlp:3", 4)] == ["mlp:3", "4"]
