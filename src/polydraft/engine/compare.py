"""Drafting against plain decoding, side by side in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import NoDraft
from polydraft.engine.emission import Statistics, summed
from polydraft.engine.generate import stream
from polydraft.engine.run import Run


@dataclass(frozen=True)
class Comparison:
    """Paired measurements of drafting and plain decoding.

    Args:
        plain: totals with `NoDraft`.
        drafted: totals with the drafter.
        speedups: per pair of runs, tokens per second with drafts over tokens per second without.
        same_text: per pair, whether both gave the same tokens; at temperature 0 they must.
    """

    plain: Statistics
    drafted: Statistics
    speedups: tuple[float, ...]
    same_text: tuple[bool, ...]

    @property
    def speedup(self) -> float:
        """The median of the paired speed-ups."""
        return median(self.speedups)

    @property
    def shows(self) -> str:
        """What the pairs show of drafting: that it is "faster" or "slower", or that it is "not told apart".

        The median of n pairs lies within their range with probability 1 - 2^(1 - n) (0.94 for five), so a range that
        includes 1 shows nothing, and one pair has none.
        """
        if len(self.speedups) > 1 and (min(self.speedups) > 1 or max(self.speedups) < 1):
            return "faster" if self.speedup > 1 else "slower"
        return "not told apart"

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {
            "speedup": round(self.speedup, 3),
            "speedups": [round(value, 3) for value in self.speedups],
            "same_text": list(self.same_text),
            "plain": self.plain.as_dict(),
            "drafted": self.drafted.as_dict(),
        }


def compare(
    model: nn.Module,
    prompts: Sequence[Int[Tensor, "1 _"]],
    *,
    repeats: int = 1,
    on_pair: Callable[[Run, Run], None] | None = None,
    **options: Any,
) -> Comparison:
    """Generate every prompt with and without drafts, alternating which goes first, and compare their speed.

    Both arms run the same loop on the same model in this process; a short run of each warms up first.

    Args:
        model: the target.
        prompts: one row each.
        repeats: how often the whole set is run.
        on_pair: called after each pair with the plain and the drafted run, for progress and display.
        **options: those of `generate`.
    """
    plain_options = {**options, "drafter": NoDraft()}
    for warm in (plain_options, options):
        stream(model, prompts[0], **{**warm, "max_new_tokens": 8}).exhaust()
    pairs: list[tuple[Run, Run]] = []
    for number, prompt in enumerate(list(prompts) * repeats):
        order = (plain_options, options) if number % 2 == 0 else (options, plain_options)
        runs = [stream(model, prompt, **chosen).exhaust() for chosen in order]
        plain, drafted = runs if number % 2 == 0 else runs[::-1]
        pairs.append((plain, drafted))
        if on_pair is not None:
            on_pair(plain, drafted)
    return Comparison(
        summed([plain.statistics for plain, _ in pairs]),
        summed([drafted.statistics for _, drafted in pairs]),
        tuple(d.statistics.tokens_per_second / p.statistics.tokens_per_second for p, d in pairs),
        tuple(p.new_tokens == d.new_tokens for p, d in pairs),
    )
