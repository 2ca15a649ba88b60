"""The text drafters that are routed or merged where nobody names any."""

from polydraft.drafters.contract import Drafter
from polydraft.drafters.routing.merge import MergedDrafter
from polydraft.drafters.routing.routed import RoutedDrafter
from polydraft.drafters.text import NgramDrafter, RecyclingDrafter, SuffixDrafter, TextDrafter


def usual_members() -> tuple[TextDrafter, ...]:
    """Return prompt lookup, suffix decoding and token recycling, with nothing learnt from other texts.

    Suffix decoding drafts more than its authors' servers do, whose passes are full: it brought more of the tokens on
    both models that were measured (docs/drafting_without_training.md).
    """
    return NgramDrafter(), SuffixDrafter(factor=2, offset=1), RecyclingDrafter()


def route() -> RoutedDrafter:
    """Return a route between the usual text drafters."""
    return RoutedDrafter(usual_members())


def route_first(other: Drafter) -> RoutedDrafter:
    """Return a route between the usual text drafters and another drafter."""
    return RoutedDrafter(usual_members(), other)


def route_before(first: TextDrafter, drafter: Drafter) -> RoutedDrafter:
    """Return a route between a text drafter and any other, which is a member if it can be."""
    if isinstance(drafter, RoutedDrafter):
        return RoutedDrafter((first, *drafter.members), drafter.other)
    if isinstance(drafter, MergedDrafter) and drafter.other is None:
        return RoutedDrafter((first, *drafter.members))
    if isinstance(drafter, TextDrafter) and not drafter.needs.riders:
        return RoutedDrafter((first, drafter))
    return RoutedDrafter((first,), drafter)


def merge() -> MergedDrafter:
    """Return the usual text drafters in one tree."""
    return MergedDrafter(usual_members())


def merge_beside(other: Drafter) -> MergedDrafter:
    """Return the usual text drafters and another drafter in one tree."""
    return MergedDrafter(usual_members(), other)
