"""One draft head under many rules: chains, trees of top tokens and sampled trees, at equal numbers of scored nodes.

A block head knows the law of every path without another pass, so that a tree of any width costs it one pass. What such
trees bring is measured twice. The expected tokens per call are computed, not sampled: while a text is written, every
tree is put before all rules of its scheme, and what each accepts of it on average is summed. The speed is that of
texts which all arms write side by side.

How much of what is possible that is, theory says for a call's first token: whatever an exact rule does further down,
the token that it emits first follows the target, and is one of the root's drafts at most as often as the best coupling
of the two lets it be, `optimal_set`. A lifted node rule keeps one with its own acceptance at the root, whichever way it
is lifted, which is computed. Of a rule for whole trees the trees tell, less the luck that the optimal rule had there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.bench.speed import PromptBatch
from polydraft.drafters import Drafter, NoDraft
from polydraft.engine import stream
from polydraft.errors import InvalidParameter
from polydraft.models import Pair
from polydraft.probs import Noise, to_atoms
from polydraft.schemes import Scheme
from polydraft.theory import optimal_set
from polydraft.trees import Draft, Verdict
from polydraft.verifiers import NodeVerifier, Optimal, PathLaw, PathVerifier, has_marginal, traits
from polydraft_lab.subjects.clock import Progress, unseen
from polydraft_lab.subjects.lattice_groups import GROUPS, LatticeGroup
from polydraft_lab.subjects.planner import Lane, batches, side_by_side

WARM_UP = 8
"""How many tokens every arm writes before anything counts."""


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
        first: how often a call keeps at least one draft.
        optimum: how often an exact rule can at most.
        nodes: mean number of drafts of a tree.
        speed: median over texts of the speed over plain decoding's; None if no time was taken.
    """

    temperature: float
    drafts: int
    trees: str
    rule: str
    tokens_per_call: float
    interval: tuple[float, float]
    first: float
    optimum: float
    nodes: float
    speed: float | None


@dataclass(frozen=True, eq=False)
class Watching:
    """Verify by one rule, and sum up what all rules of its scheme accept of the same trees on average.

    Args:
        rule: decides.
        rules: are asked what they would accept.
        accepted: what each accepts of every tree, in drafts.
        first: with what chance each keeps a draft of the root, on average over drafts.
        optimum: the largest such chance that the scheme allows.
        sizes: the trees' numbers of drafts.
    """

    rule: PathVerifier
    rules: Sequence[PathVerifier]
    accepted: list[list[float]] = field(default_factory=list)
    first: list[list[float]] = field(default_factory=list)
    optimum: list[float] = field(default_factory=list)
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
        laws = [rule.path_law(draft, target_probs) for rule in self.rules]
        self.accepted.append([float(law.accepted(draft.tree).sum()) for law in laws])
        root = Root.of(draft, target_probs)
        self.optimum.append(root.optimum(self.scheme))
        self.first.append([root.kept(*one) for one in zip(self.rules, laws, strict=True)])
        self.sizes.append(int(draft.tree.valid[:, 1:].sum()))
        return self.rule.verify(draft, target_probs, noise)


@dataclass(frozen=True, eq=False)
class Root:
    """The roots of trees, with what rules keep of their drafts; rows of a batch are summed up.

    Args:
        drafts: as places in the shortlist.
        draft_probs: the row that they were drawn from, with the tail.
        target_probs: the target's, on the same atoms.
    """

    drafts: Int[Tensor, "b k"]
    draft_probs: Float[Tensor, "b A"]
    target_probs: Float[Tensor, "b A"]

    @classmethod
    def of(cls, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> "Root":
        """Take the roots of trees."""
        rows = torch.nn.functional.pad(draft.probs[:, 0], (0, 1)).double()
        return cls(draft.drafted_atoms()[:, 0], rows, to_atoms(target_probs[:, 0], draft.shortlist[:, 0]).double())

    @property
    def counts(self) -> Int[Tensor, "b"]:
        """How many drafts they have."""
        return (self.drafts >= 0).sum(dim=-1)

    def optimum(self, scheme: Scheme) -> float:
        """Return the largest chance of keeping a draft, of all exact rules, on average over drafts."""
        return float(optimal_set(scheme, self.draft_probs, self.target_probs, self.counts).acceptance.sum())

    def kept(self, rule: PathVerifier, law: PathLaw) -> float:
        """Return a rule's chance of keeping a draft, on average over drafts.

        Args:
            rule: the rule.
            law: that of its verdict of these very trees, which is an estimate: the chance that the path does not end at
                the root. What the optimal rule keeps of the same drafts beyond its average is subtracted.
        """
        node = traits(rule).node_rule
        if node is not None and self._can_follow(node):
            return float(node.acceptance(self.draft_probs, self.target_probs, self.counts).sum())
        best = Optimal(rule.scheme)
        lucky = float(best.law(self.drafts, self.draft_probs, self.target_probs).child.sum())
        return float((1 - law.end[:, 0]).sum()) + self.optimum(rule.scheme) - lucky

    def _can_follow(self, rule: NodeVerifier) -> bool:
        """Tell whether a rule's acceptance can be computed; the tail is never drafted."""
        tokens, most = self.draft_probs.shape[-1] - 1, max(int(self.counts.max()), 1)
        return has_marginal(rule, most, tokens)


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
    texts: Sequence[PromptBatch]
    options: LatticeOptions
    on_progress: Progress

    def accepted(self, temperature: float, drafts: int, group: LatticeGroup, speeds: Speeds) -> Iterator[LatticeResult]:
        """Write all texts with the group's last rule, and yield what each rule accepts of the trees on average."""
        named = group.rules(drafts)
        rules, what = [*named.values()], f"T = {temperature:g}, {drafts} drafts, {group.name}"
        seen = list[Watching]()
        for number, text in enumerate(self.texts):
            seen.append(Watching(rules[-1], rules))
            own = _options(temperature, self.options, number) | {"policy": group.policy(drafts), "verifier": seen[-1]}
            stream(self.pair.target, text.input_ids, drafter=group.drafter(self.head), **own).exhaust()
            self.on_progress(what, number + 1, len(self.texts))
        every = _summed([one.accepted for one in seen])
        steps = torch.tensor([len(one.accepted) for one in seen], dtype=torch.float64)
        count, intervals = float(steps.sum()), self._intervals(every, steps)
        nodes, optimum = (sum(sum(getattr(one, name)) for one in seen) / count for name in ("sizes", "optimum"))
        means, firsts = _mean([one.accepted for one in seen]), _mean([one.first for one in seen])
        for name, mean, kept, interval in zip(named, means, firsts, intervals, strict=True):
            timed = speeds.get((drafts, group.name, name))
            speed = median(timed) if timed else None
            yield LatticeResult(temperature, drafts, group.name, name, 1 + mean, interval, kept, optimum, nodes, speed)

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
            (drafts, group.name, name): {
                "drafter": group.drafter(self.head),
                "policy": group.policy(drafts),
                "verifier": rule,
            }
            for drafts in self.options.drafts
            for group in GROUPS
            for name, rule in group.rules(drafts).items()
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


def _summed(steps: Sequence[Sequence[Sequence[float]]]) -> Float[Tensor, "t r"]:
    """Return the sums over the steps of every text."""
    return torch.stack([torch.tensor(one, dtype=torch.float64).sum(0) for one in steps])


def _mean(steps: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the means over all steps of all texts."""
    return (_summed(steps).sum(0) / sum(map(len, steps))).tolist()


def _options(temperature: float, options: LatticeOptions, number: int) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_k": 0,
        "eos_token_id": None,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed + number,
    }
