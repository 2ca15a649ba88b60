"""What a view of a model must say, by Hugging Face's own passes over the keys that the model has written."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.models import LayerSet
from polydraft.trees import TokenTree

OUTWARD = ("o_proj", "dense", "c_proj", "out_proj")
DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2")


def skipping(
    *numbers: int, attention: Sequence[int] = (), mlp: Sequence[int] = (), exit: int | None = None
) -> LayerSet:
    return LayerSet(frozenset({*numbers, *attention}), frozenset({*numbers, *mlp}), exit)


@torch.no_grad()
def over_the_models_keys(
    model: PreTrainedModel, other: PreTrainedModel, row: list[int], tree: TokenTree, at: int
) -> Tensor:
    """Return another model's logits at the nodes of a row's tree, path by path, by Hugging Face's own passes.

    The keys of all tokens before the root are those of a full pass of the model.
    """
    past = None
    if row[:-1]:
        past = model(torch.tensor([row[:-1]]), use_cache=True).past_key_values
    found = list[Tensor]()
    for node in range(tree.tokens.shape[1]):
        path = [0, *(tree.ancestors[at, node, 1:].nonzero().squeeze(-1) + 1).tolist()]
        own, logits = copy.deepcopy(past), torch.zeros(0)
        for token in tree.tokens[at, path].tolist():
            step = other(torch.tensor([[token]]), past_key_values=own, use_cache=True)
            own, logits = step.past_key_values, step.logits[0, -1]
        found.append(logits)
    return torch.stack(found)


def without(model: PreTrainedModel, layers: LayerSet) -> PreTrainedModel:
    """Return a copy whose skipped sub-layers multiply what they make by zero, whatever they read."""
    other, count = copy.deepcopy(model), model.config.num_hidden_layers
    (listed,) = [one for one in other.modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    for numbers, parts, names in (
        (layers.skipped_attention, ("self_attn", "attn", "attention"), OUTWARD),
        (layers.skipped_mlp, ("mlp", ""), DOWN),
    ):
        for number in numbers:
            layer: Any = listed[number]
            part = next((getattr(layer, one) for one in parts if one and hasattr(layer, one)), layer)
            ends = [getattr(part, one) for one in names if hasattr(part, one)]
            for weight in [weight for end in ends for weight in end.parameters()] or part.experts.parameters():
                weight.data.zero_()
    return other


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * float(expected.abs().max()))
