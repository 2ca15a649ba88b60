"""The programme over sub-layers: against all sets of them, by hand, and of a model's own sub-layers."""

from itertools import combinations
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor
from torch.nn.functional import cosine_similarity

from polydraft.drafters.itself.skip_programme import skip_table, tokens_per_work
from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel, LayerSet, layer_set, logits_of, sublayers, walk, without
from polydraft.reading import Reader, Text, first_drafts

MOST = 9


@pytest.mark.parametrize("seed", range(8))
def test_of_sub_layers_that_add_apart_from_each_other_the_best_sets_are_found(seed: int) -> None:
    """Each adds along an axis of its own, so that which of two states is nearer stays so; costs are any."""
    stream = torch.Generator().manual_seed(seed)
    added = torch.diag(torch.rand(7, generator=stream, dtype=torch.float64))[1:]
    costs = torch.randint(1, 5, (6,), generator=stream).tolist()
    first = torch.tensor([1.0, *[0.0] * 6], dtype=torch.float64)
    table = skip_table(first, costs, MOST, lambda number, states: states + added[number])
    best = dict[int, float]()
    for count in range(7):
        for skipped in combinations(range(6), count):
            saved = sum(costs[number] for number in skipped)
            state = first + added[[number for number in range(6) if number not in skipped]].sum(0)
            near = float(cosine_similarity(state, first + added.sum(0), dim=0))
            best[saved] = max(best.get(saved, -1.0), near)
    for saved, skipped in enumerate(table.sets):
        assert (skipped is None) == (saved not in best)
        if skipped is not None:
            assert sum(costs[number] for number in skipped) == saved
            assert float(table.nearness[saved]) == pytest.approx(best[saved], abs=1e-12)
            kept = [number for number in range(6) if number not in skipped]
            torch.testing.assert_close(table.states[saved], first + added[kept].sum(0))


def test_a_cell_keeps_the_nearer_state_by_hand() -> None:
    """Whole layers of cost 1, one of them saved: the first turns the state, the second does nearly nothing."""
    turns = [torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.1], [0.0, 1.0]])]
    table = skip_table(torch.tensor([1.0, 0.0]), [1, 1], 1, lambda number, states: states @ turns[number])
    assert table.sets == ((), (1,)) and table.states[1].tolist() == [0.0, 1.0]


def test_expected_tokens_by_work() -> None:
    assert tokens_per_work(0.5, 0.25, 1.0, 2) == pytest.approx((1 + 0.5 + 0.25) / 1.5)
    assert tokens_per_work(1.0, 0.0, 1.0, 3) == pytest.approx(4.0)


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def read(model: HuggingFaceModel) -> Any:
    text = Text(torch.tensor([TOKENS]), torch.tensor([len(TOKENS)]))
    return Reader.new(model, 1, 40).catch_up(text)[0]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "mistral"])
def test_copies_that_walk_are_the_model_without_what_each_has_skipped(kind: str) -> None:
    """One copy runs all, one skips a part, one another; all beside each other, as passes of their own tell."""
    model = HuggingFaceModel(tiny_model(kind, num_hidden_layers=2, dtype=torch.float64))
    parts, known = sublayers(model), len(TOKENS) - 1
    reader = read(model)
    states, through = walk(model, reader.cache, TOKENS[-1], known, 3)
    for number, part in enumerate(parts):
        run = through(part, states)
        states = torch.stack([states[row] if number == row - 1 else run[row] for row in range(3)])
    found = logits_of(model, states)
    for row, skipped in enumerate([[], [parts[0]], [parts[1]]]):
        own = without(model, layer_set(skipped))
        text = torch.tensor(TOKENS)
        expected = first_drafts(own, reader.cache, text, range(known, known + 1), known)[0]
        torch.testing.assert_close(found[row], expected)


def test_a_set_without_a_copy_is_the_variant_of_the_same_set() -> None:
    model = HuggingFaceModel(tiny_model("llama", num_hidden_layers=3, dtype=torch.float64))
    layers = LayerSet(frozenset({0}), frozenset({1, 2}))

    def rows(one: HuggingFaceModel) -> Tensor:
        return first_drafts(one, read(model).cache, torch.tensor(TOKENS), range(2, 7), 7)

    torch.testing.assert_close(rows(without(model, layers)), rows(model.variant("", layers)))


def test_first_drafts_are_those_of_chains_begun_at_each_place() -> None:
    model = HuggingFaceModel(tiny_model("llama", num_hidden_layers=2, dtype=torch.float64))
    own, reader = without(model, LayerSet(frozenset({1}), frozenset({0}))), read(model)
    before = [one.clone() for one in reader.cache.in_slot(5)]
    found = first_drafts(own, reader.cache, torch.tensor(TOKENS), range(1, 7), 7)
    for at, place in enumerate(range(1, 7)):
        text = Text(torch.tensor([TOKENS]), torch.tensor([place + 1]))
        short = Reader.new(model, 1, 40).catch_up(text)[0]
        alone = first_drafts(own, short.cache, torch.tensor(TOKENS), range(place, place + 1), place)
        torch.testing.assert_close(found[at], alone[0])
    assert all(torch.equal(*pair) for pair in zip(before, reader.cache.in_slot(5), strict=True))


def test_work_counts_weights_and_keys() -> None:
    model = HuggingFaceModel(tiny_model("llama", num_hidden_layers=2, dtype=torch.float64))
    parts, layer = sublayers(model), model.model.model.layers[0]
    for part, module in zip(parts[:2], (layer.self_attn, layer.mlp), strict=True):
        assert part.work(0) == 8 * sum(one.numel() for one in module.parameters())
    keys = layer.self_attn.k_proj.out_features + layer.self_attn.v_proj.out_features
    assert parts[0].work(5) - parts[0].work(0) == 8 * 5 * keys and parts[1].work(5) == parts[1].work(0)
    assert [part.name for part in parts] == ["attention 0", "mlp 0", "attention 1", "mlp 1"]


def test_a_model_without_a_fused_pass_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Sub-layers to skip are chosen by the fused pass"):
        sublayers(HuggingFaceModel(tiny_model("llama"), fused=False))
