"""The nodes about to get children, and the draft rows that are proposed for them.

Below a row that is no law nothing is drafted, and the other rows of the batch go on. Every row is looked at before a
child is drawn from it, so that what is wrong with it is known from what was drawn above.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidDraft, TargetMismatch, UnpairedScheme, VocabularyMismatch
from polydraft.probs import sent


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes of one depth, about to get children.

    Args:
        nodes: their numbers among the nodes that were ever proposed for, the root being 0. With a static shape these
            are their numbers in the tree as well; with a growing policy `Draft.scored` tells which became which.
        tokens: their token ids.
        depth: their depth; 0 is the root's.
        ancestors: for each, which of the first `nodes.stop` nodes it descends from, itself included.
    """

    nodes: range
    tokens: Int[Tensor, "b f"]
    depth: int
    ancestors: Bool[Tensor, "b f n"]

    def lent(self, device: torch.device) -> "Frontier":
        """Return a copy on a device, for somebody who may write to it."""
        return replace(self, tokens=sent(self.tokens.clone(), device), ancestors=sent(self.ancestors.clone(), device))


Propose = Callable[[Frontier], tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]]
"""Gives each frontier node its shortlist of K token ids and their draft probabilities; J rows each for `Product`."""

Overlap = Callable[[Frontier], Float[Tensor, "b f"]]
"""Estimates the overlap of the nodes' rows with the target's, for rows that were proposed just now."""

MENDABLE = (UnpairedScheme, VocabularyMismatch, TargetMismatch)
"""Errors of pairing, which a user has to mend: they are raised wherever they occur."""


TOLERANCE = 1e-4
"""How far the sum of a draft row may be from one."""


class ProposedRows(NamedTuple):
    """The draft rows that were proposed for the nodes of a depth.

    Args:
        listed: their lists; no token where a row is no law.
        probs: the rows; zeros where one is no law.
        sound: which nodes have a law; None if all have.
    """

    listed: Int[Tensor, "b f K"]
    probs: Float[Tensor, "b f *J K"]
    sound: Bool[Tensor, "b f"] | None

    def any_law(self) -> Float[Tensor, "b f *J K"]:
        """Return rows to draw from: any law for those that are none, since what is drawn there does not count."""
        if self.sound is None:
            return self.probs
        return self.probs.where(_beside(self.sound, self.probs), 1 / self.probs.shape[-1])


def usable_rows(
    found: tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]],
    frontier: Frontier,
    first: Float[Tensor, "b _ *J K"] | None,
    *,
    trusted: bool,
) -> ProposedRows:
    """Look at the draft rows that were proposed for the nodes of a depth.

    A node whose row is no law of distinct tokens gets no tokens and a row of zeros.

    Args:
        found: their lists and rows; whatever it is, if it is not trusted. They are brought to the host.
        frontier: the nodes, on the device of these rows.
        first: the rows of the root; None if it is the root that is looked at.
        trusted: whether the rows are known to be laws of distinct tokens, or zeros; else they are copied, since
            whoever proposed them may use their memory again.

    Raises:
        InvalidDraft: what came are no lists and rows of these nodes.
    """
    if trusted:
        listed, law = (one.cpu() for one in found)
        fine = law.flatten(2).amax(dim=-1) > 0
        return ProposedRows(listed, law, None if bool(fine.all()) else fine)
    listed, law = (one.clone().cpu() for one in _of_these(found, frontier, first))
    fine = laws(law).all(dim=-1) & distinct(listed)
    if bool(fine.all()):
        return ProposedRows(listed, law, None)
    return ProposedRows(listed.where(fine.unsqueeze(-1), -1), law.where(_beside(fine, law), 0.0), fine)


def _of_these(
    found: Any, frontier: Frontier, first: Float[Tensor, "b _ *J K"] | None
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
    """Return what was proposed, if it is a list and rows for every node."""
    pair: tuple[Any, ...] = cast(tuple[Any, ...], found) if isinstance(found, tuple) else ()
    if len(pair) != 2:
        raise InvalidDraft(f"The proposal must be lists and rows, but is a {type(cast(object, found)).__name__}.")
    listed, law = pair
    device, size = frontier.tokens.device, tuple(frontier.tokens.shape)
    for name, one in (("lists", listed), ("rows", law)):
        if not isinstance(one, Tensor):
            raise InvalidDraft(f"The proposal's {name} must be a tensor, but are a {type(one).__name__}.")
        if one.device != device:
            raise InvalidDraft(f"The proposal's {name} must be on {device}, but are on {one.device}.")
        if one.dim() < 3 or tuple(one.shape[:2]) != size or 0 in one.shape:
            raise InvalidDraft(
                f"The proposal's {name} must be of the {size[0]} x {size[1]} nodes that were asked for, but have shape "
                f"{tuple(one.shape)}."
            )
    if listed.dtype != torch.int64 or not law.is_floating_point():
        raise InvalidDraft(
            f"The proposal's lists must be of type torch.int64 and its rows of a floating point type, but they are of "
            f"types {listed.dtype} and {law.dtype}."
        )
    members = tuple(law.shape[2:-1][:1]) if first is None else tuple(first.shape[2:-1])
    if listed.dim() != 3 or tuple(law.shape[2:-1]) != members or law.shape[-1] != listed.shape[-1]:
        raise InvalidDraft(
            f"The proposal's rows have shape {tuple(law.shape)}, which does not fit lists of shape "
            f"{tuple(listed.shape)} and {members or 'a single row'} at the root."
        )
    return listed, law


def laws(law: Float[Tensor, "b f *J K"]) -> Bool[Tensor, "b f j"]:
    """Tell which of the nodes' rows are distributions."""
    rows = law.flatten(2, -2) if law.dim() == 4 else law.unsqueeze(-2)
    return (rows.amin(dim=-1) >= 0) & ((rows.sum(dim=-1, dtype=torch.float64) - 1).abs() <= TOLERANCE)


def distinct(listed: Int[Tensor, "b f K"]) -> Bool[Tensor, "b f"]:
    """Tell which lists name no token twice; negative numbers are no tokens."""
    if listed.device.type == "cpu":
        plain = (listed[..., 1:] > listed[..., :-1]).all(dim=-1) | (listed < 0).all(dim=-1)
        if bool(plain.all()):  # rising or empty lists, which are sooner looked through than sorted
            return plain
    listed = listed.sort(dim=-1).values
    return ~((listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] >= 0)).any(dim=-1)


def both(one: Bool[Tensor, "b"] | None, nodes: Bool[Tensor, "b f"] | None) -> Bool[Tensor, "b"] | None:
    """Return in which rows all of some nodes have a law, and all those before; None if that is known of all."""
    if nodes is None:
        return one
    return nodes.all(dim=-1) if one is None else one & nodes.all(dim=-1)


def alike(rows: Sequence[Tensor], empty: float) -> list[Tensor]:
    """Give the rows of all depths the same number of places, by empty ones behind the last."""
    most = max(one.shape[-1] for one in rows)
    pad = torch.nn.functional.pad
    return [one if one.shape[-1] == most else pad(one, (0, most - one.shape[-1]), value=empty) for one in rows]


def _beside(nodes: Bool[Tensor, "b f"], law: Float[Tensor, "b f *J K"]) -> Bool[Tensor, "b f *_"]:
    return nodes.view(*nodes.shape, *[1] * (law.dim() - 2))
