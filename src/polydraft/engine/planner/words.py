"""The words for policies that choose the tree of every step."""

from polydraft.engine.planner.goodput import Goodput
from polydraft.engine.planner.planner import Planner

PLANNERS: dict[str, type[Planner] | type[Goodput]] = {"auto": Planner, "goodput": Goodput}
