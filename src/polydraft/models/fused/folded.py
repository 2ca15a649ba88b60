"""The fold for models that run their own modules: heads of queries that share a head of keys are read as one head.

Given a mask and several queries, transformers copies keys and values for every head of queries, in every layer and
pass. Here these heads become queries of one head, as in the fused pass, so that each key is read once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KERNEL = "sdpa"
FOLDED = 64
"""Of more queries than this the mask would be large, and arithmetic bounds the pass."""
WITHOUT_EFFECT = frozenset(
    "dropout scaling is_causal position_ids sliding_window use_cache logits_to_keep output_router_logits".split()
)
"""What models hand to their attention that is heeded here, or that changes nothing beside a mask."""
_MASKS: ContextVar[WeakTensorKeyDictionary | None] = ContextVar("polydraft_masks", default=None)
"""The masks of this thread's pass, each with its repetition for the queries of a group; None outside of passes."""
_NOTED: ContextVar[tuple[int, list[Tensor]] | None] = ContextVar("polydraft_noted", default=None)
"""Of how many of the last tokens of this thread's pass queries are noted, and those of its layers so far."""


@contextmanager
def folding(queries: int = 0) -> Iterator[list[Float[Tensor, "b q w"]]]:
    """Fold what this thread attends to in here, as far as models use transformers' own attention with masks.

    A function that somebody else registered in its place stays, and nothing folds: it may compute something else.

    Args:
        queries: of how many of the last tokens queries are noted, layer by layer, each times what its scores are
            multiplied by; the list that is given has them behind the pass.
    """
    noted = list[Tensor]()
    before = _NOTED.set((queries, noted)) if queries else None
    if ALL_ATTENTION_FUNCTIONS.get(KERNEL) is sdpa_attention_forward:
        ALL_ATTENTION_FUNCTIONS.register(KERNEL, attend)
    outer = _MASKS.set(WeakTensorKeyDictionary())
    try:
        yield noted
    finally:
        _MASKS.reset(outer)
        if before is not None:
            _NOTED.reset(before)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa_attention_forward` does, which gets every call outside of `folding` as it is.

    Args:
        query: "b h n d"; `key` and `value` are "b k m d" and "b k m e", and what is returned is "b n h e".
    """
    # compiled code is another's, and could not be traced through the variable
    masks = None if torch.compiler.is_compiling() else _MASKS.get()
    if masks is not None and (asked := _NOTED.get()) is not None:
        scale = named.get("scaling") or query.shape[-1] ** -0.5
        asked[1].append((query[:, :, -asked[0] :] * scale).transpose(1, 2).flatten(2))
    if masks is None or attention_mask is None or rest or not _folds(module, query, key, attention_mask, named):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *rest, **named)
    batch, heads, width, _ = query.shape
    group = heads // key.shape[1]
    mask = masks.get(attention_mask)
    if mask is None or mask.shape[2] != group * width:
        mask = masks[attention_mask] = attention_mask.repeat(1, 1, group, 1)
    folded = query.reshape(batch, -1, group * width, query.shape[-1])
    seen = functional.scaled_dot_product_attention(folded, key, value, mask, scale=named.get("scaling"))
    return seen.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), None


def _folds(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, named: Mapping[str, Any]) -> bool:
    """Tell whether queries are few, share heads of keys, and are bound by the mask alone."""
    if query.dim() != 4 or key.dim() != 4 or not 1 < query.shape[2] <= FOLDED:
        return False
    (batch, heads, width, _), (rows, shared, slots, _) = query.shape, key.shape
    return (
        shared < heads == shared * getattr(module, "num_key_value_groups", 1)
        and rows == batch
        and mask.shape == (batch, 1, width, slots)
        and not named.get("dropout")
        and all(one is None or one is False or name in WITHOUT_EFFECT for name, one in named.items())
    )
