"""Several drafters for one text: one of them for every step, or all in one tree."""

from polydraft.drafters.routing.lookup_first import LookupFirst
from polydraft.drafters.routing.merge import MergedDrafter
from polydraft.drafters.routing.nested import NestedDrafter
from polydraft.drafters.routing.routed import RoutedDrafter, choice_law, hedged
from polydraft.drafters.routing.usual import merge, merge_beside, route, route_before, route_first, usual_members

__all__ = [
    "LookupFirst",
    "MergedDrafter",
    "NestedDrafter",
    "RoutedDrafter",
    "choice_law",
    "hedged",
    "merge",
    "merge_beside",
    "route",
    "route_before",
    "route_first",
    "usual_members",
]
