"""How trees are read from text: a function for each kind, called with what stands behind the colon."""

from collections.abc import Callable
from typing import Any

from polydraft.trees import (
    EAGLE_25,
    FALCON_165,
    MEDUSA_63,
    AdaptiveThreshold,
    BestFirst,
    Chain,
    Confident,
    Eagle2,
    EntropyBound,
    ExpectedAcceptance,
    Fixed,
    PathProbability,
    TokenProbability,
    TreePolicy,
    TrunkThenBranch,
    Widths,
)
from polydraft.trees.growing import EMBEDDED, Confidence

Read = Callable[[str], TreePolicy]


def widths(numbers: str) -> TreePolicy:
    """Read children per depth: 4,2,2,1."""
    return Widths(_counts(numbers))


def chain(numbers: str) -> TreePolicy:
    """Read a chain's length."""
    return Chain(int(numbers))


def trunk(numbers: str) -> TreePolicy:
    """Read a trunk's length and the children per depth above it: 2+3,2."""
    length, branches = numbers.split("+")
    return TrunkThenBranch(int(length), _counts(branches))


def _published(policy: TreePolicy) -> Read:
    """Return the reader of a published tree, which has no numbers."""

    def read(numbers: str) -> TreePolicy:
        if numbers:
            raise ValueError(numbers)
        return policy

    return read


def _budget(policy: type[BestFirst]) -> Read:
    """Return the reader of trees of so many drafts, with their depth and children: 16 or 16x4:3."""

    def read(numbers: str) -> TreePolicy:
        size, *children = numbers.split(":")
        return policy(*(int(part) for part in size.split("x", 1)), **_named("children", children))

    return read


def eagle_2(numbers: str) -> TreePolicy:
    """Read width, depth and drafts: 10x6:25, or nothing for the published tree."""
    if not numbers:
        return Eagle2()
    size, *drafts = numbers.split(":")
    width, depth = (int(part) for part in size.split("x"))
    return Eagle2(width, depth, **_named("drafts", drafts))


def _confident(confidence: Confidence) -> Read:
    """Return the reader of trees that end below doubtful drafts: 8:0.4 or 3,2,1:0.4."""

    def read(numbers: str) -> TreePolicy:
        counts, *threshold = numbers.split(":")
        shape = _counts(counts) if "," in counts else (1,) * Chain(int(counts)).shape.depth
        return Confident(shape, _threshold(threshold, Confident.threshold), confidence)

    return read


def disco(numbers: str) -> TreePolicy:
    """Read a length and a threshold: 8 or 8:0.5; the classifier is that of the embedded pair."""
    length, *threshold = numbers.split(":")
    shape = (1,) * Chain(int(length)).shape.depth
    return Confident(shape, _threshold(threshold, Confident.threshold), EMBEDDED)


def adaptive(numbers: str) -> TreePolicy:
    """Read a length and the first threshold: 8 or 8:0.6."""
    length, *threshold = numbers.split(":")
    return AdaptiveThreshold(int(length), _threshold(threshold, AdaptiveThreshold.threshold))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _named(name: str, parts: list[str]) -> dict[str, Any]:
    """Return the last number of a text under its name, or nothing if it was left out."""
    return {name: int(*parts)} if parts else {}


def _threshold(parts: list[str], otherwise: float) -> float:
    return float(*parts) if parts else otherwise


eagle, medusa = _published(Fixed(EAGLE_25)), _published(Fixed(MEDUSA_63))
falcon = _published(Fixed(FALCON_165))
best_first, expected = _budget(BestFirst), _budget(ExpectedAcceptance)
confident, confident_path = _confident(TokenProbability()), _confident(PathProbability())
confident_entropy = _confident(EntropyBound())
