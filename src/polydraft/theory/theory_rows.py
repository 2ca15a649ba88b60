"""Rows as theory reads them: what is drawn for certain, and how much mass prefixes have."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes.scheme import largest_count, support_size


def likeliest(draft_probs: Float[Tensor, "*b A"], number: Int[Tensor, "*b"]) -> Bool[Tensor, "*b A"]:
    """Mark the `number` likeliest tokens that have any mass, earlier ones first among equals."""
    number = torch.minimum(number, support_size(draft_probs))
    most = largest_count(number)
    if most == 0:
        return torch.zeros_like(draft_probs, dtype=torch.bool)
    largest = draft_probs.topk(most, dim=-1).values
    least = largest.gather(-1, (number - 1).clamp_min(0).unsqueeze(-1))
    above, level = draft_probs > least, draft_probs == least
    left = number.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    return (above | (level & (level.cumsum(dim=-1) <= left))) & (number > 0).unsqueeze(-1)


def prefix_sums(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A+1"]:
    """Return the mass of the first j tokens for j = 0..A."""
    return torch.nn.functional.pad(mass.cumsum(dim=-1), (1, 0))


def suffix_sums(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A+1"]:
    """Return the mass of all but the first j tokens for j = 0..A, added up from the end: small tails stay exact."""
    return torch.nn.functional.pad(mass.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))


def of_others(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A"]:
    """Return the mass of all tokens but each one, without subtracting: small remainders stay exact."""
    return prefix_sums(mass)[..., :-1] + suffix_sums(mass)[..., 1:]
