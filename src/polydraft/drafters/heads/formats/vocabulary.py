"""The tokens of a head that drafts fewer than its target has, as folders write them."""

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters.heads.formats.fields import Tensors
from polydraft.errors import CheckpointError


def draft_tokens(tensors: Tensors) -> Int[Tensor, " v"] | None:
    """Take the head's tokens out of a folder's tensors; None if there are none.

    `d2t` holds offsets: token j of the head is j + d2t[j] of the target (EAGLE-3). `t2d` says of each of the target's
    tokens whether the head has it. Some writers put the ids themselves into `d2t`, which `t2d` shows.

    Raises:
        CheckpointError: both do not fit each other, or tokens are named twice.
    """
    if not tensors.has("d2t"):
        tensors.drop("t2d")
        return None
    found = tensors.take("d2t").long()
    if found.dim() != 1 or not len(found):
        raise CheckpointError(
            f"The head in {tensors.folder.name} is damaged: d2t has shape {list(found.shape)}, no list of tokens."
        )
    offsets = found + torch.arange(len(found))
    name = tensors.folder.name
    if not tensors.has("t2d"):
        tokens = offsets
    else:
        wanted = tensors.take("t2d").bool().nonzero().squeeze(-1)
        tokens = next((one for one in (offsets, found) if torch.equal(one.sort().values, wanted)), None)
        if tokens is None:
            raise CheckpointError(f"The head in {name} is damaged: d2t and t2d name different tokens.")
    if int(tokens.min()) < 0 or len(tokens.unique()) != len(tokens):
        raise CheckpointError(f"The head in {name} is damaged: d2t names a token twice, or one below 0.")
    return tokens


def target_tokens(tensors: Tensors) -> int | None:
    """Return how many tokens the target has by the tensors that have a row for each; None if there are none."""
    rows = ("t2d", "embed_tokens.weight", *(() if tensors.has("d2t") else ("lm_head.weight",)))
    name = next((one for one in rows if tensors.has(one)), None)
    return None if name is None or not tensors.left[name].dim() else len(tensors.left[name])


def offsets_of(tokens: Int[Tensor, " v"], vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` and `t2d` of a head's tokens.

    Args:
        tokens: ids of the target.
        vocab_size: how many the target has.
    """
    there = torch.zeros(vocab_size, dtype=torch.bool)
    there[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": there}
