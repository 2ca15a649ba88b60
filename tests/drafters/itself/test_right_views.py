"""What a view says is what the model says under a mask for every layer and head: at each depth, ragged, over steps."""

from functools import cache
from typing import Any

import pytest
import torch
from doubles import tiny_model
from families import built
from key_views import AnyKeys, chain_of, own_rows, started, text_of
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters.itself.few_keys import UNCHOSEN, FewKeys, NewestQueries
from polydraft.models import HuggingFaceModel
from polydraft.reading import Reader
from polydraft.trees import TokenTree, TreeShape, Verdict, topology

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [7, 2, 1], [2, 7, 1, 8, 2, 8, 1, 8, 2], [4]]
BUDGET, DEPTH = 5, 3
BUILT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 6},
    "gemma4_text": {
        "sliding_window": 6,
        "vocab_size_per_layer_input": 24,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
    },
    "minicpm3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
}
"""Layers with windows among others, keys of several shapes, and values that are not as wide as keys."""
FUSED = ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "gemma3_text"]
CASES = [*((kind, True) for kind in FUSED), *((kind, False) for kind in dict.fromkeys((*FUSED, *BUILT)))]


@cache
def module(kind: str, attention: str | None = None) -> PreTrainedModel:
    if kind in BUILT:
        model = built(kind, {**BUILT[kind], "vocab_size": 24})
        model.config._attn_implementation = attention or "sdpa"
        return model
    changes = {"sliding_window": 6} if kind == "mistral" else {}
    return tiny_model(kind, attention=attention, **changes)


@cache
def model(kind: str, fused: bool) -> HuggingFaceModel:
    found = HuggingFaceModel(module(kind), fused=fused)
    assert (found.fused is not None) == fused, found.why_not_fused
    return found


def kept(row: list[Tensor] | None, known: int, copied: int, target: HuggingFaceModel) -> list[Tensor]:
    """Return by layer the slots of each head: those that were chosen at a length, or all, and all tokens since."""
    cache, found = target.new_cache(1, 4), list[Tensor]()
    shapes = cache.shapes or [(2, 0)] * 2 * target.layers
    full = [layer for layer in range(target.layers) if layer not in cache.windowed]
    for layer in range(target.layers):
        heads = shapes[2 * layer][0] if cache.shapes else _heads(target)
        newest = torch.arange(max(copied - BUDGET, 0), copied).expand(heads, -1)
        own = newest if row is None or layer not in full else row[full.index(layer)]
        found.append(torch.cat([own, torch.arange(copied, known).expand(heads, -1)], -1))
    return found


def _heads(target: HuggingFaceModel) -> int:
    config = target.model.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def chosen_rows(keys: AnyKeys, own: FewKeys, before: FewKeys, target: HuggingFaceModel) -> dict[int, list[Tensor]]:
    """Return what was chosen of the rows whose keys were chosen just now, where there was a choice."""
    layers = target.layers - len(target.new_cache(1, 4).windowed)
    new = [row for row, (now, then) in enumerate(zip(own.chosen, before.chosen, strict=True)) if now != then]
    return (
        dict(zip([row for row in new if own.chosen[row] > BUDGET], keys.taken(layers), strict=True)) if layers else {}
    )


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_rows_are_the_models_under_a_mask_for_every_head(kind: str, fused: bool) -> None:
    """In five steps keys are chosen anew, of each row at its own time."""
    target, eager = model(kind, fused), module(kind, "eager")
    rows, keys = [list(row) for row in ROWS], AnyKeys(BUDGET)
    text = text_of(rows)
    reader, queries = started(target, text)
    own, slots, checked = FewKeys((UNCHOSEN,) * len(rows)), dict[int, list[Tensor]](), 0
    stream = torch.Generator().manual_seed(1)
    for step in range(5):
        text, before = text_of(rows), own
        queries = tuple(any_queries(queries[0], count - 1) for count in text.counts)
        own, view = before.following(keys, reader.at(text), queries, DEPTH + 1, 64)
        slots |= chosen_rows(keys, own, before, target)
        drafts = torch.randint(24, (len(rows), DEPTH), generator=stream)
        found = chain_of(view, text, drafts)
        for row, tokens in enumerate(rows):
            held = kept(slots.get(row), len(tokens) - 1, own.chosen[row], target)
            expected = own_rows(eager, [*tokens, *drafts[row].tolist()], len(tokens) - 1, held)
            torch.testing.assert_close(found[row], expected, atol=3e-5, rtol=1e-5)
            checked += int(row in slots)
        reader, rows = step_taken(reader, rows, drafts, [3, (step + 1) % 4, step % 4, 1])
    assert checked > 8 or not slots
    assert any(now > then > 0 for now, then in zip(own.chosen, [len(row) - 1 for row in ROWS], strict=True))


def any_queries(like: NewestQueries, end: int) -> NewestQueries:
    """Return the queries of a last token: any will do where slots are drawn."""
    return NewestQueries(end, torch.zeros(1, sum(like.widths)), like.widths)


def step_taken(
    reader: Reader, rows: list[list[int]], drafts: Tensor, lengths: list[int]
) -> tuple[Reader, list[list[int]]]:
    """Let the target score the chains, accept so many drafts of each row, and write a token behind them."""
    text, shape = text_of(rows), TreeShape(((1,),) * DEPTH)
    tokens = torch.cat([text.last().unsqueeze(-1), drafts], 1)
    tree = TokenTree(tokens, topology(shape, len(rows), torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))
    reader = reader.score(text, tree)[1]
    order = torch.arange(1, DEPTH + 1).expand(len(rows), -1)
    length = torch.tensor(lengths)
    path = order.where(order <= length.unsqueeze(-1), -1)
    reader = reader.keep(text, Verdict(path, length, torch.full_like(length, 11)))
    return reader, [[*row, *own[:count].tolist(), 11] for row, own, count in zip(rows, drafts, lengths, strict=True)]


@pytest.mark.parametrize("wrong", ["nothing", "a slot", "heads", "a place", "the tail"])
def test_a_wrong_slot_a_shifted_place_and_exchanged_heads_are_seen(wrong: str) -> None:
    """What the test above rests on: with any of these the rows are others."""
    target, eager, keys = model("llama", True), module("llama", "eager"), AnyKeys(BUDGET)
    rows, drafts = [ROWS[0]], torch.tensor([[4, 2, 6]])
    text = text_of(rows)
    reader, queries = started(target, text)
    own, view = FewKeys((UNCHOSEN,)).following(keys, reader.at(text), queries, DEPTH + 1, 64)
    (slots,) = keys.taken(2)
    if wrong == "a slot":
        free = next(slot for slot in range(12) if slot not in slots[1][0])
        view.cache.take(0, reader.cache.select([0]), [torch.tensor([[free]])], torch.tensor([0]), 2)
    elif wrong == "heads":
        slots = [one.flip(0) for one in slots]
    elif wrong == "the tail":
        view = reader.over(view.cache, [BUDGET - 1])
    found = chain_of(view, text, drafts)[0]
    expected = own_rows(eager, [*ROWS[0], *drafts[0].tolist()], 12, slots, shift=int(wrong == "a place"))
    apart = (found - expected).abs().amax(-1)
    assert bool((apart < 3e-5).all()) if wrong == "nothing" else bool((apart[-1] > 1e-3).all()), apart
    assert own.chosen == (12,)
