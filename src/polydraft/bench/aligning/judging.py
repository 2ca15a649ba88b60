"""The verdict: plain decoding, what the user had before, and the new draft, side by side by the clock.

"Before" is at each temperature the fastest of what needed no training, plain decoding among it. It is chosen on the
same runs that judge, which favours it: so it takes more to be called better.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.prompts import Prompt
from polydraft.bench.speed import PLAIN, Arm, SpeedRecord, SpeedResults, SpeedSettings, measure_speed
from polydraft.bench.speed.speed_ups import PairedRuns, SpeedUp, speed_up
from polydraft.bench.table import grouped
from polydraft.models import Pair

AFTER = "after"
WINS, HOLDS = 1.0, 0.98
"""The lower bound of after / before is to be above the first at one temperature, and above the second at all others."""
REPEATS = 50
"""How often each prompt is measured at most."""


@dataclass(frozen=True)
class Judged:
    """What was found at one temperature.

    Args:
        temperature: of sampling.
        before: the name of the fastest arm but the new draft; that of plain decoding where nothing is faster.
        ratio: how much faster the new draft is than that.
        over_plain: how much faster than plain decoding each arm is.
        prompts: how many were measured.
    """

    temperature: float
    before: str
    ratio: Estimate
    over_plain: dict[str, Estimate]
    prompts: int

    @property
    def fastest(self) -> float:
        """How much faster than plain decoding what was there before is."""
        return self.over_plain[self.before].mean if self.before in self.over_plain else 1.0


@dataclass(frozen=True)
class AlignmentVerdict:
    """Whether a new draft is better than what was there before.

    Args:
        better: whether it is.
        reason: why, or why not.
        judged: what was found, by temperature.
    """

    better: bool
    reason: str
    judged: tuple[Judged, ...] = ()

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return "better" if self.better else "no better"


def compare(
    pair: Pair,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    results: SpeedResults,
    left: Callable[[], float],
) -> None:
    """Measure rounds until there is no time for a further one, at least one prompt at every temperature.

    Args:
        left: how many seconds there are.
    """
    done, least = results.done(arms), len(settings.temperatures)
    if len(done) >= least and left() <= 0:
        return
    shown = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total} s"
    with tqdm(total=round(left()), desc="plain, before and after", bar_format=shown) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arms that find that drafts do not pay are measured all the same
        before = left()
        for records in measure_speed(pair, arms, prompts, settings, done):
            results.add(records)
            now = left()
            taken, before = before - now, now
            bar.update(min(taken, bar.total - bar.n))
            if len(results.done(arms)) >= least and now <= taken:
                break


def judge(records: Sequence[SpeedRecord], seed: int) -> tuple[Judged, ...]:
    """Return what was found at each temperature, of rounds that all arms finished."""
    by_heat = grouped(records, lambda one: one.temperature)
    return tuple(_judged(heat, own, seed) for heat, own in sorted(by_heat.items()))


def _judged(heat: float, records: Sequence[SpeedRecord], seed: int) -> Judged:
    runs = {(one.arm, one.round): one for one in records}
    arms = list(dict.fromkeys(one.arm for one in records))
    every = [key for key in dict.fromkeys(one.round for one in records) if all((arm, key) in runs for arm in arms)]
    over_plain = {arm: _ratio(runs, every, arm, PLAIN, seed).total for arm in arms if arm != PLAIN}
    speeds = {PLAIN: 1.0, **{arm: one.mean for arm, one in over_plain.items() if arm != AFTER}}
    before = max(speeds, key=lambda arm: speeds[arm])
    prompts = len({(key[0], key[1]) for key in every})
    return Judged(heat, before, _ratio(runs, every, AFTER, before, seed).total, over_plain, prompts)


def _ratio(runs: Mapping[Any, SpeedRecord], keys: Sequence[Any], one: str, other: str, seed: int) -> SpeedUp:
    by_prompt = grouped(keys, lambda key: (key[0], key[1])).values()
    return speed_up([[_paired(runs[one, key], runs[other, key]) for key in own] for own in by_prompt], seed)


def _paired(own: SpeedRecord, other: SpeedRecord) -> PairedRuns:
    return PairedRuns(own.new_tokens, own.seconds, other.new_tokens, other.seconds)


def verdict_of(judged: Sequence[Judged], beside: str = "") -> AlignmentVerdict:
    """Return the verdict: better where it is surely faster at one temperature and surely not slower at all others.

    Args:
        beside: what else explains it, as a sentence.
    """
    wins = any(one.ratio.above(WINS) for one in judged)
    holds = all(one.ratio.above(HOLDS) for one in judged)
    told = "; ".join(ratio_in_words(one) for one in judged)
    few = any(one.ratio.low is None for one in judged)
    why = " Fewer than two prompts were judged, so that nothing is sure: give more prompts or minutes." if few else ""
    return AlignmentVerdict(
        wins and holds, f"after / before is {told}.{why}{f' {beside}' if beside else ''}", (*judged,)
    )


def ratio_in_words(one: Judged) -> str:
    """Say how much faster the new draft is at a temperature."""
    found = one.ratio
    interval = "" if found.low is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.mean:.3f}{interval} at temperature {one.temperature:g}, before being {one.before}"
