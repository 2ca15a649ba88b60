"""Spec-Bench's thirteen categories as its six kinds: the eight categories of MT-Bench are one of them."""

from collections.abc import Sequence
from dataclasses import replace

from polydraft.bench.prompts.prompt import Prompt, in_turn

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
KIND = "mt-bench"
"""The kind of the eight categories."""


def by_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of one set grouped by kind, if the set is Spec-Bench; else as they are.

    A set is Spec-Bench if it has prompts of all thirteen categories. The categories of MT-Bench take turns within their
    kind, so that its first eight prompts are of eight categories.
    """
    categories = {one.task for one in prompts}
    if not categories.issuperset((*MT_BENCH, *OTHERS)):
        return list(prompts)
    mixed = in_turn([one for one in prompts if one.task in MT_BENCH])
    ours = [replace(one, task=KIND) for one in mixed]
    return ours + [one for one in prompts if one.task not in MT_BENCH]
