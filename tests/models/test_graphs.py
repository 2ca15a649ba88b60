"""Recorded passes against fused ones. A tape of operations stands for a CUDA graph: it runs no Python again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from doubles import fused, scored, tiny_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polydraft
from polydraft.drafters import ModelDrafter
from polydraft.models import HuggingFaceModel
from polydraft.models.fused.graphs import SEEN, Graphs, Tensors
from polydraft.models.tiny import tiny_of_type
from polydraft.trees import Widths

LONG = {"max_position_embeddings": 512}
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "item")
KINDS = ("llama", "gemma2", "gpt2", "olmo2", "stablelm")


class Tape(TorchDispatchMode):
    """What was run, to be run again in the same memory; a read of a number by the host is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"{func} reads a number"
        made = func(*args, **(kwargs or {}))
        self.run.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.run:
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(made), again, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def on_tape(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    with Tape() as tape:
        made = run()
    assert tape.run
    return tape.replay, made


def recorded(model: object) -> HuggingFaceModel:
    """Return a fused model whose passes are recorded when their shape was seen often enough."""
    made = fused(model)
    assert made.fused is not None
    made.fused.graphs = Graphs(made.fused, on_tape)
    return made


@contextmanager
def noted(made: HuggingFaceModel) -> Iterator[list[object]]:
    """Note what is recorded."""
    assert made.fused is not None
    graphs, found = made.fused.graphs, list[object]()
    assert graphs is not None
    own = graphs.record

    def record(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        found.append(run)
        return own(run)

    graphs.record = record
    yield found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_replayed_passes_score_trees_like_fused_ones(kind: str, lengths: list[int]) -> None:
    model = tiny_of_type(kind)
    wanted, made = scored(fused(model), lengths), recorded(model)
    with noted(made) as found:
        for turn in range(SEEN + 4):
            for plain, fast in zip(wanted, scored(made, lengths), strict=True):
                torch.testing.assert_close(fast, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))
            assert bool(found) == (turn >= SEEN - 1), "the shape was seen twice a turn"
    assert len(found) <= 2, "what was recorded over a cache's memory serves the next cache"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rows", [1, 2])
def test_texts_of_replayed_passes_are_those_of_fused_ones(temperature: float, rows: int) -> None:
    pair = [tiny_model(seed=seed, **LONG) for seed in (1, 2)]
    prompt = torch.arange(6 * rows).view(rows, 6)
    settings = {"policy": Widths((3, 2)), "temperature": temperature, "seed": 3, "max_new_tokens": 40}
    given = {"attention_mask": torch.ones_like(prompt), **settings}
    wanted = polydraft.stream(pair[0], prompt, drafter=ModelDrafter(fused(pair[1])), **given).exhaust()
    target, draft = recorded(pair[0]), recorded(pair[1])
    with noted(target) as found, noted(draft) as others:
        texts = [polydraft.stream(pair[0], prompt, drafter=ModelDrafter(draft), **given).exhaust() for _ in range(2)]
    assert [one.new_tokens for one in texts] == [wanted.new_tokens] * 2
    assert found and others


def test_hidden_states_leave_replayed_passes() -> None:
    model, layers = tiny_model(seed=1, **LONG), (0, 1, 2, "final")
    made, wanted = recorded(model), fused(model)
    mask, starts = torch.ones(2, 8, 8, dtype=torch.bool).tril(), torch.zeros(2, dtype=torch.long)
    for first in range(SEEN + 3):
        tokens, places = torch.arange(first, first + 16).view(2, 8), torch.arange(8).expand(2, 8)
        found = []
        for one in (made, wanted):
            cache = one.new_cache(2, 8)
            one.forward(tokens[:, :5], places[:, :5], mask[:, :5, :5], cache, starts)
            rest = tokens[:, 5:], places[:, 5:], mask[:, 5:]
            found.append(one.forward(*rest, cache, starts + 5, hidden_layers=layers, logits_to_keep=2))
        torch.testing.assert_close(found[0].logits, found[1].logits)
        for layer in layers:
            torch.testing.assert_close(found[0].hidden[layer], found[1].hidden[layer])


def test_memory_of_caches_is_used_again_and_never_by_two() -> None:
    made = recorded(tiny_model(seed=1, **LONG))
    tokens, mask = torch.arange(4).view(1, 4), torch.ones(1, 4, 4, dtype=torch.bool).tril()

    def begun() -> Any:
        cache = made.new_cache(1, 40)
        for _ in range(2):  # memory is made by the first pass, and met by the second
            made.forward(tokens, tokens, mask, cache, torch.zeros(1, dtype=torch.long))
        return cache

    first, second = begun(), begun()
    places = {one.stores[0].data_ptr() for one in (first, second)}
    assert len(places) == 2
    del first, second
    again = [begun(), begun(), begun()]
    assert places < {one.stores[0].data_ptr() for one in again}
    assert len({one.stores[0].data_ptr() for one in again}) == 3


def test_nothing_in_a_pass_depends_on_numbers_that_only_the_device_knows() -> None:
    made = fused(tiny_model(seed=1, **LONG))
    assert made.fused is not None
    tokens, mask = torch.arange(4).view(1, 4), torch.ones(1, 4, 4, dtype=torch.bool).tril()
    cache = made.new_cache(1, 8)
    made.forward(tokens, tokens, mask, cache, torch.zeros(1, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        found = made.fused(tokens, tokens, {one.kind: mask for one in made.windows}, cache, 0, (1,))
    assert found.logits.shape[:2] == (1, 4)
