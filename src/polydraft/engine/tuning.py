"""Tuning: measure what a pair accepts and costs, choose trees by it, and use the choice, measured anew if need be."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, DraftRequest, ModelDrafter, NoDraft, Session, drafter_of
from polydraft.engine.choices import check_crowd, default_policy, default_verifier, without_branches
from polydraft.engine.generate import stream
from polydraft.engine.measured import ROUNDS, Rounds, time_target, timed, timed_steps, up_to
from polydraft.errors import InvalidParameter, UnpairedScheme, UnsupportedModel, shown
from polydraft.models import HuggingFaceModel, Pair
from polydraft.planning.acceptance import OBSERVED, RecordingVerifier, Visit, tally
from polydraft.planning.costs import Curve, StepCosts
from polydraft.planning.plan import Machine, PairIdentity, PairPlan, TunedTree, searched
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Scheme
from polydraft.trees import Chain, Draft, Fixed, TreePolicy, TreeShape, Widths
from polydraft.verifiers import TreeVerifier, ValueCurves

FRONTIERS = (1, 2, 4, 8, 16, 32)
LEVELS = 3
"""How many levels of one width are timed at once: their time stands out from the noise of the clock."""
Progress = Callable[[str, int, int], None]


@torch.inference_mode()
def time_draft(
    drafter: Drafter,
    scheme: Scheme,
    tokens: Int[Tensor, "1 t"],
    vocab_size: int,
    most: int,
    *,
    rounds: int = ROUNDS,
    on_progress: Rounds,
) -> tuple[Curve, float]:
    """Time one level of drafting over f = 1 to `most` nodes, and what a draft costs beyond its levels.

    A level's time is that of the pass and of drawing the children: trees with three more levels of f nodes, less trees
    with none, over three. The rest of a tree's time is its start: the root's level takes up two tokens.
    """
    text = Text(torch.nn.functional.pad(tokens, (0, 1)), torch.full_like(tokens[0, :1], tokens.shape[1]))
    room = tokens.shape[1] + (LEVELS + 1) * most + 2
    state = drafter.read(drafter.start(text, Session(SamplingParams(), room, vocab_size)), text, None)
    noise = Noise.from_seed(0, 1)

    def draft(policy: TreePolicy) -> None:
        drafter.draft(state, DraftRequest(text, scheme, policy, noise))

    tasks = {0: partial(draft, Chain(1))}
    for width in up_to(FRONTIERS, most):
        tasks[width] = partial(draft, Fixed(Widths((width, *(1,) * LEVELS)).shape))
        try:
            tasks[width]()
        except (InvalidParameter, UnpairedScheme):  # a scheme that draws fewer children
            del tasks[width]
            break
    samples = timed(tasks, tokens.device, rounds, on_progress)
    short = samples.pop(0)
    levels = {
        width: [(whole - root) / LEVELS for whole, root in zip(times, short, strict=True)]
        for width, times in samples.items()
    }
    curve = Curve.through(levels)
    return curve, max(0.0, median(short) - curve(1))


NAMES = ("target", "draft model")
MOST_CHILDREN = 8
WIDEST_LEVEL = 32
"""The widest level that is timed; what wider ones take is extrapolated."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        tokens: generated per prompt and temperature.
        rounds: how often every pass is timed.
        seed: fixes what is generated and drawn.

    Raises:
        InvalidParameter: fewer than two tokens or one round.
    """

    tokens: int = 64
    rounds: int = ROUNDS
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.tokens, 2), ("rounds", self.rounds, 1)):
            if value < least:
                raise InvalidParameter(f"{name} must be at least {least}, but is {value}.")


QUICK = Effort(tokens=32, rounds=3)
"""What is measured before a generation whose plan does not fit."""


def _silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


def tune(
    pair: Pair,
    prompts: Sequence[Int[Tensor, "1 _"]],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    verifier: TreeVerifier | None = None,
    max_nodes: int = 32,
    max_depth: int = 8,
    effort: Effort = Effort(),
    names: tuple[str, str] = NAMES,
    on_progress: Progress = _silent,
) -> PairPlan:
    """Measure a pair on this machine and choose the tree with the most tokens per second at each temperature.

    Rule: time the target's pass by tree size and the drafter's by level; generate every prompt, plainly and with a wide
    tree, to see what the verifier accepts and what else a step takes; search by `fastest_shape`.
    Approximation: rates depend on depth and number of children alone; times were taken after as many tokens as half of
    the prompts have, with half of the new ones; what a step takes beside the passes does not depend on the tree. All
    this costs speed where it is untrue; the output is exact with any plan.
    Source: Sequoia, arXiv 2402.12374, section 3.

    Args:
        pair: target and draft model with their tokenizer.
        prompts: texts of the kind that will be generated, one row each.
        temperatures: the target's, one tree each; the draft model's are the same.
        verifier: the rule; None is the default of each temperature.
        max_nodes: the largest tree, the root included.
        max_depth: the most drafts on a path.
        effort: how much is measured.
        names: what target and draft model are called in the plan.
        on_progress: called with what is being measured, how much of it is done, and how much there is.

    Raises:
        InvalidParameter: no draft model, no prompt, no temperature, or an argument outside its range.
        ContextOverflow: a prompt leaves no room for a token.
        UnpairedScheme: the verifier's drafts cannot come from a model.
        UnsupportedModel: one of the models scores chains only.
    """
    params = [SamplingParams(temperature) for temperature in sorted({*temperatures})]
    if not prompts or not params:
        raise InvalidParameter("Tuning needs at least one prompt and one temperature.")
    if max_nodes < 2 or max_depth < 1:
        raise InvalidParameter(f"Trees must be allowed 2 nodes and depth 1 at least, not {max_nodes} and {max_depth}.")
    drafter, target = _drafter(pair), HuggingFaceModel(pair.target)
    check_crowd(target, drafter)
    unable = without_branches(target, drafter)
    if unable is not None:
        raise UnsupportedModel(
            f"Tuning searches trees, but {unable} scores chains only; "
            'policy="auto" chooses their lengths while it generates.'
        )
    text = _timing_text(prompts, effort.tokens, target.context - max_nodes)
    task = _Task(pair, drafter, prompts, text, max_nodes, max_depth, effort, on_progress)
    rules = [verifier or default_verifier(drafter, one) for one in params]
    for rule in rules:
        drafter.check(rule.scheme)
    report = partial(on_progress, "timing the target's pass")
    passes = time_target(target, text, max_nodes, rounds=effort.rounds, on_progress=report)
    drafting = {scheme: _drafting(task, scheme) for scheme in dict.fromkeys(rule.scheme for rule in rules)}
    trees = tuple(
        _tuned(task, rule, one, passes, drafting[rule.scheme]) for rule, one in zip(rules, params, strict=True)
    )
    return PairPlan(PairIdentity.of(pair, names), Machine.of(pair), text.shape[1], max_nodes, max_depth, trees)


def planned(
    plan: PairPlan,
    pair: Pair,
    prompt: Int[Tensor, "1 t"],
    temperature: float,
    *,
    verifier: TreeVerifier | None = None,
    names: tuple[str, str] = NAMES,
    on_progress: Progress = _silent,
) -> dict[str, Any]:
    """Return the drafter, verifier and policy of a plan, as options of `generate`.

    The tree is that of the nearest temperature in the plan. A plan of other models, or without a tree for the verifier
    at such a temperature, is replaced by a short tuning on the prompt; of a plan of another machine the acceptance
    rates are kept and the times measured anew. Both warn and take about as long as generating a hundred tokens plainly.

    Args:
        plan: what was tuned.
        pair: the models that will generate.
        prompt: what they will continue, one row.
        temperature: the target's.
        verifier: the rule; None is the default for the temperature.
        names: what target and draft model are called in the warning.
        on_progress: as for `tune`.

    Raises:
        InvalidParameter: no draft model, or a temperature outside its range.
        ContextOverflow: the prompt leaves no room for a token.
        UnpairedScheme: the verifier's drafts cannot come from a model.
    """
    drafter = _drafter(pair)
    rule = verifier or default_verifier(drafter, SamplingParams(temperature))
    others = PairIdentity.of(pair, names).differences(plan.pair)
    tree = None if others else plan.at(temperature, rule.scheme.name, rule.name)
    lacking = [] if others or tree else [f"no tree for {rule.name} at temperature {temperature:g}"]
    reasons = [*others, *lacking] or Machine.of(pair).differences(plan.machine)
    if tree is None or reasons:
        warnings.warn(
            f"The plan does not fit ({'; '.join(reasons)}); measuring again on this prompt.",
            RuntimeWarning,
            stacklevel=2,
        )
        fresh = tune(
            pair,
            [prompt],
            temperatures=[temperature],
            verifier=verifier,
            max_nodes=plan.max_nodes,
            max_depth=plan.max_depth,
            effort=QUICK,
            on_progress=on_progress,
        ).trees[0]
        if tree is None:
            tree = fresh
        else:
            shape = searched(tree.acceptance, fresh.costs, plan.max_nodes, plan.max_depth)
            tree = replace(tree, costs=fresh.costs, shape=shape)
    drafts, curves = bool(tree.shape.counts), tree.curves
    verifier = replace(cast(Any, rule), curves=curves) if curves and getattr(rule, "measured", None) else rule
    return {"drafter": drafter if drafts else NoDraft(), "verifier": verifier, "policy": Fixed(tree.shape)}


@dataclass(frozen=True, eq=False)
class _Task:
    """What is tuned: models, prompts, the text after which passes are timed, limits and effort."""

    pair: Pair
    drafter: ModelDrafter
    prompts: Sequence[Int[Tensor, "1 _"]]
    text: Int[Tensor, "1 t"]
    max_nodes: int
    max_depth: int
    effort: Effort
    on_progress: Progress


@dataclass(frozen=True)
class _Drafting:
    """What drafting costs under a scheme: a level, the rest of a draft, and the widest level that could be timed."""

    level: Curve
    start: float
    widest: int


@dataclass(frozen=True, eq=False)
class _Watched:
    """What generations showed: the nodes visited, and what a step takes beside the passes, with and without drafts."""

    visits: list[Visit]
    overhead: float
    plain_overhead: float


def _drafter(pair: Pair) -> ModelDrafter:
    if pair.draft is None:
        raise InvalidParameter("A plan is for a target and a draft model, and there is no draft model.")
    if not isinstance(pair.draft, nn.Module):
        raise InvalidParameter(f"A plan is for a draft model, and what drafts here is {shown(pair.draft)}.")
    if drafter_of(pair.draft).needs.passes is not None:
        raise InvalidParameter(
            f"A plan is for a draft model that takes a pass for each level, and this {type(pair.draft).__name__} was "
            "trained to fill masks in one; leave the plan out."
        )
    return ModelDrafter(HuggingFaceModel(pair.draft))


def _timing_text(prompts: Sequence[Int[Tensor, "1 _"]], tokens: int, room: int) -> Int[Tensor, "1 t"]:
    """Return the longest prompt, repeated or cut to the length that texts have half-way through their generation."""
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    length = max(2, min(int(median(prompt.shape[1] for prompt in prompts)) + tokens // 2, room))
    return longest.repeat(1, -(-length // longest.shape[1]))[:, :length]


def _drafting(task: _Task, scheme: Scheme) -> _Drafting:
    level, start = time_draft(
        task.drafter,
        scheme,
        task.text,
        HuggingFaceModel(task.pair.target).vocab_size,
        min(task.max_nodes - 1, WIDEST_LEVEL),
        rounds=task.effort.rounds,
        on_progress=partial(task.on_progress, f"timing drafts, {scheme.name}"),
    )
    return _Drafting(level, start, level.points[-1][0])


def _tuned(task: _Task, rule: TreeVerifier, params: SamplingParams, passes: Curve, drafting: _Drafting) -> TunedTree:
    """Watch the verifier at one temperature and search."""
    watched = _watched(task, rule, params, drafting.widest)
    costs = StepCosts(passes, drafting.level, drafting.start, watched.overhead, watched.plain_overhead)
    rates = tally(rule, watched.visits, min(MOST_CHILDREN, task.max_nodes - 1), task.effort.seed).rates()
    shape = searched(rates, costs, task.max_nodes, task.max_depth)
    return TunedTree(
        temperature=params.temperature,
        scheme=rule.scheme.name,
        verifier=rule.name,
        shape=shape,
        usual=default_policy(task.drafter, params).shape,
        acceptance=rates,
        visits=len(watched.visits),
        costs=costs,
        curves=_curves(task, rule, params, shape),
    )


def _curves(task: _Task, rule: TreeVerifier, params: SamplingParams, shape: TreeShape) -> ValueCurves | None:
    """Generate every prompt with the tree that was chosen, and measure curves if the rule gives shares by them."""
    measured = getattr(rule, "measured", None)
    if measured is None or not shape.counts or not params.temperature:
        return None
    recording, options = RecordingVerifier(rule), _options(task, params, Fixed(shape))

    def finished() -> Iterator[tuple[Draft, Tensor]]:
        for done, prompt in enumerate(task.prompts, start=1):
            for _ in stream(task.pair.target, prompt, drafter=task.drafter, verifier=recording, **options):
                if recording.seen and recording.seen[0].planned == shape:
                    yield recording.seen[:2]
                recording.seen = None  # a text may end with a token of no step
            task.on_progress(f"measuring shares, temperature {params.temperature:g}", done, len(task.prompts))

    return measured(shape, finished()).curves


def _options(task: _Task, params: SamplingParams, policy: TreePolicy) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": params.temperature, "seed": task.effort.seed, "policy": policy}
    return options | {"max_new_tokens": task.effort.tokens, **({"top_k": 0} if params.temperature else {})}


def _watched(task: _Task, rule: TreeVerifier, params: SamplingParams, widest: int) -> _Watched:
    """Generate every prompt with the first tree that scheme and verifier can do."""
    *wide, narrow = OBSERVED
    for policy in wide:
        if policy.shape.max_children <= widest:
            with suppress(UnpairedScheme):  # a verifier of one draft per node
                return _watch(task, rule, params, policy)
    return _watch(task, rule, params, narrow)


def _watch(task: _Task, rule: TreeVerifier, params: SamplingParams, policy: TreePolicy) -> _Watched:
    recording, options = RecordingVerifier(rule), _options(task, params, policy)
    shorter = {**options, "max_new_tokens": max(2, task.effort.tokens // 2)}  # one token a step
    seen: list[Visit] = []
    plain: list[float] = []
    drafted: list[float] = []
    for done, prompt in enumerate(task.prompts, start=1):
        run = stream(task.pair.target, prompt, drafter=NoDraft(), verifier=rule, **shorter)
        plain.extend(seconds.beside for seconds in timed_steps(run))
        run = stream(task.pair.target, prompt, drafter=task.drafter, verifier=recording, **options)
        for seconds in timed_steps(run):
            drafted.append(seconds.beside)
            seen.extend(recording.visits())
        task.on_progress(f"generating, temperature {params.temperature:g}", done, len(task.prompts))
    return _Watched(seen, max(0.0, median(drafted)), max(0.0, median(plain)))
