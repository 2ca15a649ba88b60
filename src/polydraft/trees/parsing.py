"""Tree policies as text, for the command line and for tables."""

import re
from collections.abc import Callable

from polydraft.errors import InvalidParameter
from polydraft.trees.dynamic import (
    AdaptiveThreshold,
    BestFirst,
    Confidence,
    Confident,
    Eagle2,
    EntropyBound,
    PathProbability,
    TokenProbability,
)
from polydraft.trees.policies import Chain, Fixed, TreePolicy, TrunkThenBranch, Widths, shortened
from polydraft.trees.shape import EAGLE_25, MEDUSA_63


def parse_policy(text: str) -> TreePolicy:
    """Read a policy from text.

    Ways: "4,2,2,1" (children per depth), "chain:5", "trunk:2+3,2" (a chain, then children per depth), "eagle" and
    "medusa" (published trees), "best-first:16" or "best-first:16x4:3" (drafts x depth : children), "eagle-2" or
    "eagle-2:10x6:25" (width x depth : drafts), "confident:8:0.4" or "confident:3,2,1:0.4" (length or children per depth
    : threshold on the token; likewise "confident-path" and "confident-entropy"), "adaptive:8" or "adaptive:8:0.6"
    (length : first threshold).

    Raises:
        InvalidParameter: the text is none of these, or a number is out of range.
    """
    _require_text(text)
    kind, _, numbers = text.partition(":") if re.match(r"[a-z]", text) else ("", "", text)
    try:
        policy = _READERS[kind](numbers)
        if policy.shape.size > 1:
            return policy
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, InvalidParameter):
            raise
    raise InvalidParameter(
        f'A tree is written as children per depth such as "4,2,2,1", or in one of the ways {", ".join(_READERS)[2:]} '
        f"with their numbers (docs/trees.md), not as {shortened(text)}."
    )


def _require_text(value: object) -> None:
    if not isinstance(value, str):
        raise InvalidParameter(f'A tree is written as a text such as "4,2,2,1", not as {shortened(value)}.')


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _published(policy: TreePolicy) -> Callable[[str], TreePolicy]:
    def read(numbers: str) -> TreePolicy:
        if numbers:
            raise ValueError(numbers)
        return policy

    return read


def _trunk(numbers: str) -> TreePolicy:
    trunk, branches = numbers.split("+")
    return TrunkThenBranch(int(trunk), _widths(branches))


def _best_first(numbers: str) -> TreePolicy:
    size, *children = numbers.split(":")
    return BestFirst(*(int(part) for part in size.split("x", 1)), **_named("children", children))


def _eagle_2(numbers: str) -> TreePolicy:
    if not numbers:
        return Eagle2()
    size, *drafts = numbers.split(":")
    width, depth = (int(part) for part in size.split("x"))
    return Eagle2(width, depth, **_named("drafts", drafts))


def _named(name: str, parts: list[str]) -> dict[str, int]:
    """Return the last number of a text under its name, or nothing if it was left out."""
    return {name: int(*parts)} if parts else {}


def _threshold(parts: list[str], otherwise: float) -> float:
    return float(*parts) if parts else otherwise


def _confident(confidence: Confidence) -> Callable[[str], TreePolicy]:
    def read(numbers: str) -> TreePolicy:
        widths, *threshold = numbers.split(":")
        shape = _widths(widths) if "," in widths else (1,) * Chain(int(widths)).shape.depth
        return Confident(shape, _threshold(threshold, Confident.threshold), confidence)

    return read


def _adaptive(numbers: str) -> TreePolicy:
    length, *threshold = numbers.split(":")
    return AdaptiveThreshold(int(length), _threshold(threshold, AdaptiveThreshold.threshold))


_READERS: dict[str, Callable[[str], TreePolicy]] = {
    "": lambda numbers: Widths(_widths(numbers)),
    "chain": lambda numbers: Chain(int(numbers)),
    "trunk": _trunk,
    "eagle": _published(Fixed(EAGLE_25)),
    "medusa": _published(Fixed(MEDUSA_63)),
    "best-first": _best_first,
    "eagle-2": _eagle_2,
    "confident": _confident(TokenProbability()),
    "confident-path": _confident(PathProbability()),
    "confident-entropy": _confident(EntropyBound()),
    "adaptive": _adaptive,
}
