"""One draft head under many rules: chains, trees of top tokens and sampled trees, at equal numbers of scored nodes.

A block head knows the law of every path without another pass, so that a tree of any width costs it one pass. What such
trees bring is measured twice. The expected tokens per call are computed, not sampled: while a text is written, every
tree is put before all rules of its scheme, and what each accepts of it on average is summed. The speed is that of
texts which all arms write side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.bench.speed import Batch
from polydraft.bench.subjects.clock import Progress, unseen
from polydraft.bench.subjects.planner import Lane, batches, side_by_side
from polydraft.drafters import Drafter, NoDraft
from polydraft.engine import stream
from polydraft.errors import InvalidParameter
from polydraft.models import Pair
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import BestFirst, Chain, Draft, ExpectedAcceptance, TreePolicy, Verdict, Widths
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    expected_accepted,
)

PLAIN = "plain decoding"
WARM_UP = 8
"""How many tokens every arm writes before anything counts."""


@dataclass(frozen=True)
class LatticeGroup:
    """Rules that verify the same trees.

    Args:
        name: what the trees are.
        policy: makes the trees of so many drafts.
        rules: from names to rules of one scheme; the last decides while all are asked, and others are compared with it.
    """

    name: str
    policy: Callable[[int], TreePolicy]
    rules: dict[str, PathVerifier]


def _wide(drafts: int) -> TreePolicy:
    return BestFirst(drafts, depth=min(drafts, 8), children=4, beam=16)


def _expected(drafts: int) -> TreePolicy:
    return ExpectedAcceptance(drafts, depth=min(drafts, 8), children=4, beam=16, least=0.0)


def _branches(drafts: int) -> TreePolicy:
    """Return chains that begin at the root, as many as let them be five deep, but two at least."""
    count = min(max(2, round(drafts / 5)), drafts)
    return Widths((count, *[1] * (drafts // count - 1)))


def _sampled(
    shape: str, policy: Callable[[int], TreePolicy], scheme: Scheme, *others: tuple[str, PathVerifier]
) -> LatticeGroup:
    optimal = Optimal(scheme)
    rules = dict(others) | {"optimal, top down": TopDown(optimal), "optimal, bottom up": BottomUp(optimal)}
    return LatticeGroup(f"{shape}, {scheme.name}", policy, rules)


RECURSIVE = "recursive rejection"
WITHOUT = TopDown(RecursiveRejectionWithoutReplacement())
GROUPS = (
    LatticeGroup("chain", Chain, {"speculative": TopDown(SpeculativeSampling()), "block": BlockVerification()}),
    LatticeGroup("best first, top tokens", _wide, {"sample and match": TopDown(NaiveMatch(TopK()))}),
    _sampled(
        "expected acceptance",
        _expected,
        WithoutReplacement(),
        (RECURSIVE, WITHOUT),
        ("traversal", TraversalVerification()),
    ),
    _sampled(
        "branches", _branches, IID(), (RECURSIVE, TopDown(RecursiveRejection())), ("traversal", TraversalVerification())
    ),
    _sampled("branches", _branches, WithoutReplacement(), (RECURSIVE, WITHOUT)),
    _sampled("branches", _branches, TopThenSample(), ("top then sample", TopDown(TopThenSampleRule()))),
)
"""Chains; JetSpec's way: the likeliest paths, kept where a sample of the target's meets them; and drawn trees: where
most is expected to be accepted, as the confidence head says before a node's children are drawn, and chains side by
side."""


@dataclass(frozen=True)
class LatticeOptions:
    """How the arms are measured.

    Args:
        temperatures: of target and head; above 0.
        drafts: numbers of drafts of every tree and chain.
        max_new_tokens: tokens of every text; the end-of-text token ends none.
        repeats: how often every text is written against the clock; 0 to compute tokens per call only.
        seed: fixes sampled texts.

    Raises:
        InvalidParameter: a value outside its range.
    """

    temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)
    drafts: tuple[int, ...] = (6, 16)
    max_new_tokens: int = 96
    repeats: int = 1
    seed: int = 7

    def __post_init__(self) -> None:
        bounds = {"max_new_tokens": 1, "repeats": 0, "seed": 0}
        for name, bound in bounds.items():
            if getattr(self, name) < bound:
                raise InvalidParameter(f"{name} must be at least {bound}, but is {getattr(self, name)}.")
        if not self.temperatures or not all(0 < one < float("inf") for one in self.temperatures):
            raise InvalidParameter(f"Sampled trees need temperatures above 0, not {self.temperatures}.")
        if not self.drafts or min(self.drafts) < 1:
            raise InvalidParameter(f"Trees need at least 1 draft, not {self.drafts}.")


@dataclass(frozen=True)
class LatticeResult:
    """What a rule brought.

    Args:
        temperature: of target and head.
        drafts: scored nodes beside the root.
        trees: the group's name.
        rule: the rule's name.
        tokens_per_call: expected, the mean over all steps.
        interval: of it, 95 %, by a bootstrap over texts.
        share: its accepted drafts over those of the group's last rule, of the same trees; above 1 if it accepts more.
        nodes: mean number of drafts of a tree.
        speed: median over texts of the speed over plain decoding's; None if no time was taken.
    """

    temperature: float
    drafts: int
    trees: str
    rule: str
    tokens_per_call: float
    interval: tuple[float, float]
    share: float
    nodes: float
    speed: float | None


@dataclass(frozen=True, eq=False)
class Watching:
    """Verify by one rule, and sum up what all rules of its scheme accept of the same trees on average.

    Args:
        rule: decides.
        rules: are asked what they would accept.
    """

    rule: PathVerifier
    rules: Sequence[PathVerifier]
    accepted: list[list[float]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def scheme(self) -> Scheme:
        """The rule's scheme."""
        return self.rule.scheme

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def lossless(self) -> bool:
        """Whether the rule is lossless."""
        return self.rule.lossless

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Ask all rules, and decide by the one."""
        self.accepted.append([float(expected_accepted(rule, draft, target_probs).sum()) for rule in self.rules])
        self.sizes.append(int(draft.tree.valid[:, 1:].sum()))
        return self.rule.verify(draft, target_probs, noise)


def measure_lattice(
    pair: Pair,
    head: Drafter,
    prompts: Sequence[Int[Tensor, "1 _"]],
    options: LatticeOptions,
    on_progress: Progress = unseen,
) -> Iterator[LatticeResult]:
    """Yield every rule's tokens per call and speed, temperature by temperature.

    Args:
        pair: whose target writes.
        head: who drafts in all arms.
        prompts: what is continued.
        options: temperatures, sizes, lengths.
        on_progress: told of every text.
    """
    bench = _Bench(pair, head, batches(prompts, 1), options, on_progress)
    for temperature in options.temperatures:
        speeds = bench.speeds(temperature) if options.repeats else {}
        for drafts in options.drafts:
            for group in GROUPS:
                yield from bench.accepted(temperature, drafts, group, speeds)


Speeds = dict[tuple[int, str, str], list[float]]
"""By number of drafts, trees and rule: the speed over plain decoding's, text by text."""


@dataclass(frozen=True, eq=False)
class _Bench:
    """Who writes, who drafts, what is continued, and how."""

    pair: Pair
    head: Drafter
    texts: Sequence[Batch]
    options: LatticeOptions
    on_progress: Progress

    def accepted(self, temperature: float, drafts: int, group: LatticeGroup, speeds: Speeds) -> Iterator[LatticeResult]:
        """Write all texts with the group's last rule, and yield what each rule accepts of the trees on average."""
        rules, what = [*group.rules.values()], f"T = {temperature:g}, {drafts} drafts, {group.name}"
        seen = list[Watching]()
        for number, text in enumerate(self.texts):
            seen.append(Watching(rules[-1], rules))
            own = _options(temperature, self.options, number) | {"policy": group.policy(drafts), "verifier": seen[-1]}
            stream(self.pair.target, text.input_ids, drafter=self.head, **own).exhaust()
            self.on_progress(what, number + 1, len(self.texts))
        every = torch.stack([torch.tensor(one.accepted, dtype=torch.float64).sum(0) for one in seen])
        steps = torch.tensor([len(one.accepted) for one in seen], dtype=torch.float64)
        nodes, intervals = sum(sum(one.sizes) for one in seen) / float(steps.sum()), self._intervals(every, steps)
        sums = every.sum(0).tolist()
        for name, total, interval in zip(group.rules, sums, intervals, strict=True):
            timed = speeds.get((drafts, group.name, name))
            share = total / sums[-1] if sums[-1] else 1.0
            mean, speed = 1 + total / float(steps.sum()), median(timed) if timed else None
            yield LatticeResult(temperature, drafts, group.name, name, mean, interval, share, nodes, speed)

    def _intervals(self, accepted: Float[Tensor, "t r"], steps: Float[Tensor, " t"]) -> list[tuple[float, float]]:
        """Return every rule's interval of tokens per call, by a bootstrap over texts."""
        random = Noise.from_seed(self.options.seed, 1).generators[0]
        picked = torch.randint(len(steps), (2000, len(steps)), generator=random)
        drawn = 1 + accepted[picked].sum(1) / steps[picked].sum(1, keepdim=True)
        low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).tolist()
        return [*zip(low, high, strict=True)]

    def speeds(self, temperature: float) -> Speeds:
        """Let all arms and plain decoding write the texts side by side."""
        arms = {
            (drafts, group.name, name): {"drafter": self.head, "policy": group.policy(drafts), "verifier": rule}
            for drafts in self.options.drafts
            for group in GROUPS
            for name, rule in group.rules.items()
        }
        specials = [{"drafter": NoDraft()}, *arms.values()]
        for special in specials:
            own = _options(temperature, self.options, 0) | {"max_new_tokens": WARM_UP}
            side_by_side([Lane.begin(self.pair, self.texts[0], {**own, **special})])
        found: Speeds = {key: [] for key in arms}
        total = len(self.texts) * self.options.repeats
        for number in range(total):
            own, text = _options(temperature, self.options, number), self.texts[number % len(self.texts)]
            first = number % len(specials)
            order = [*range(first, len(specials)), *range(first)]
            written = side_by_side([Lane.begin(self.pair, text, {**own, **specials[place]}) for place in order])
            by_place = dict(zip(order, written, strict=True))
            for place, key in enumerate(arms):
                found[key].append(by_place[place + 1] / by_place[0])
            self.on_progress(f"T = {temperature:g}, speed", number + 1, total)
        return found


def _options(temperature: float, options: LatticeOptions, number: int) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_k": 0,
        "eos_token_id": None,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed + number,
    }
