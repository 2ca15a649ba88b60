"""Default trees by what passes take here: timed at a model's first call, and kept in the user's cache folder."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, DraftRequest, Session, owned_models, owned_networks
from polydraft.engine.emission import Stopwatch
from polydraft.errors import PolydraftError
from polydraft.fetched import cache_folder
from polydraft.models import HuggingFaceModel, LanguageModel, chosen_precision, module_of
from polydraft.planning.costs import BESIDES, Curve, StepCosts
from polydraft.planning.plan import Machine, ModelIdentity
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text, reader_of
from polydraft.trees import (
    Acceptance,
    Chain,
    Draft,
    Fixed,
    TokenTree,
    TreePolicy,
    TreeShape,
    expected_tokens,
    fastest_shape,
    in_pieces,
    topology,
)
from polydraft.trees.growing.budgets import BestFirst
from polydraft.verifiers import TreeVerifier

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROUNDS = 9
Rounds = Callable[[int, int], None]
VARIABLE = "POLYDRAFT_MEASURE"
"""The environment variable that, set to "no", leaves passes unmeasured and default trees what they are."""
KNOWN, FEW = 64, 3
"""Passes are timed behind so many tokens, each so often."""
SLOW = 0.25
"""Passes that take so many seconds are not timed: that would be noticed, and drafts nearly always pay."""
HOPED = (0.85, 0.06, 0.02)
"""Few draft models and heads are accepted more often than this, by rank: a tree that is too large at these rates is too
large for all of them."""
CLEARLY = 1.1
"""A smaller tree is taken if it is expected to be so many times as fast."""


@dataclass(frozen=True)
class DraftingCosts:
    """What passes and drafts take here, in seconds.

    Args:
        passes: the target's passes, by their numbers of tokens.
        start: what a draft takes beyond its levels.
        level: one level of a draft.
        verifying: what verifying a draft takes more than drawing a token.
    """

    passes: tuple[tuple[int, float], ...]
    start: float
    level: float
    verifying: float = 0.0

    @property
    def of_steps(self) -> StepCosts:
        """The costs of steps; what all steps take beside them is assumed, since it hardly matters."""
        plain = BESIDES / 2 * self.passes[0][1]
        return StepCosts(Curve(self.passes), Curve(((1, self.level),)), self.start, plain + self.verifying, plain)


_KNOWN: WeakKeyDictionary[nn.Module, dict[object, DraftingCosts | None]] = WeakKeyDictionary()
_LOCK = Lock()


def fitted_policy(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy
) -> TreePolicy | None:
    """Return the default tree, or a smaller one where passes of this machine ask for it; None where no draft can pay.

    Problem: kernels of few bits jump in time where a pass has more than a few tokens, and a draft may take as long as
    what it saves. Rule: search the fastest tree that is no larger than the usual one, at rates of acceptance that are
    seldom met (`HOPED`). So a tree is made smaller, or left out, only where it would not pay at lower rates either.
    Above them it may be smaller than the best. Who adapts to the true rates is `Planner`.

    The answer follows from measured costs, which are kept in the cache folder; so does a sampled text with a seed.

    Args:
        target: the target.
        drafter: who drafts: a model or a head.
        verifier: the rule, whose scheme draws the drafts.
        usual: the default tree.
    """
    costs = _costs(target, drafter, verifier, usual)
    if costs is None:
        return usual
    of_steps, bounds = costs.of_steps, usual.largest
    rates = Acceptance.positional(HOPED[: min(bounds.max_children, len(HOPED))])
    given = (rates, of_steps.verifying, of_steps.draft)
    best = fastest_shape(*given, max_nodes=usual.most_drafts + 1, max_depth=bounds.depth, overhead=of_steps.drafting)
    whole = _typical(usual, rates)
    if _rate(best, rates, of_steps) < CLEARLY * _rate(whole, rates, of_steps):
        return usual
    if not best.counts:
        _say_that_nothing_pays(costs)
        return None
    if best.max_children == 1:
        return Chain(best.depth)
    return BestFirst(best.size - 1, best.depth) if isinstance(usual, BestFirst) else Fixed(best)


def _typical(usual: TreePolicy, rates: Acceptance) -> TreeShape:
    """Return the shape of the usual tree; of one that grows, that of as many nodes which is best."""
    if not isinstance(usual, BestFirst):
        return usual.shape
    free = Curve(((1, 1.0),))
    return fastest_shape(rates, free, lambda _: 0.0, max_nodes=usual.drafts + 1, max_depth=usual.shape.depth)


def _rate(shape: TreeShape, rates: Acceptance, costs: StepCosts) -> float:
    return expected_tokens(shape, rates) / costs.of(shape)


def _say_that_nothing_pays(costs: DraftingCosts) -> None:
    (_, one), (width, several) = costs.passes[0], costs.passes[1]
    warnings.warn(
        f"Nothing is drafted: a pass over {width} tokens takes {1000 * several:.1f} ms, one over a single token "
        f"{1000 * one:.1f} ms, and a draft with its verification "
        f"{1000 * (costs.start + costs.level + costs.verifying):.1f} ms, so that drafts which are accepted "
        f"{HOPED[0]:.0%} of the time would not pay; policy=... drafts all the same.",
        stacklevel=2,
    )


def _costs(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy
) -> DraftingCosts | None:
    """Return what was measured, now or before; None where nothing is to be measured, or could be."""
    if os.environ.get(VARIABLE) == "no" or chosen_precision(target.device) or not usual.shape.counts:
        return None
    networks = [module_of(one) for one in owned_models(drafter)] + [*owned_networks(drafter)]
    own = [target.model, *(one for one in networks if one is not None)]
    if any(weight.is_meta for one in own for weight in one.parameters()):
        return None  # weights are brought for each pass, which is dear whatever its width
    asked = (verifier.name, str(usual), *map(id, networks))
    with _LOCK:
        known = _KNOWN.setdefault(target.model, {})
        if asked not in known:
            key = _key(target, networks, verifier, usual)
            found = _read(key)
            if found is None:
                found = _measured(target, drafter, verifier, usual)
                _keep(key, found)
            known[asked] = found
        return known[asked]


def _key(
    target: HuggingFaceModel, networks: Sequence[nn.Module | None], verifier: TreeVerifier, usual: TreePolicy
) -> str:
    """Return a name for all that the times depend on."""
    drafting = [ModelIdentity.of(one, type(one).__name__) for one in networks if one is not None]
    machine = Machine.of_model(target.model)
    own = ModelIdentity.of(target.model, type(target.model).__name__)
    said = (asdict(own), list(map(asdict, drafting)), asdict(machine), target.why_not_fused, verifier.name, str(usual))
    return f"{crc32(repr(said).encode()):08x}-{own.weights}"


def _measured(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy
) -> DraftingCosts | None:
    known = max(1, min(KNOWN, target.context - usual.most_drafts - 2))
    tokens = (torch.arange(known, device=target.device) % target.vocab_size).unsqueeze(0)
    try:
        if time_target(target, tokens, 1, rounds=1, on_progress=_silent)(1) > SLOW:
            return None
        rounds = FEW if target.device.type == "cpu" else ROUNDS  # recorded passes begin after some
        passes = time_target(target, tokens, usual.most_drafts + 1, rounds=rounds, on_progress=_silent)
        found = _drafting(target, drafter, verifier, usual)
    except (PolydraftError, RuntimeError):  # what cannot be drafted says so when a text is begun
        return None
    return DraftingCosts(passes.points, *found)


@torch.no_grad()
def _drafting(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy
) -> tuple[float, float, float]:
    """Time drafts of one level and of the usual tree, behind a text of one token, and what verifying takes."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    text, room = Text(token, torch.ones_like(token[0])), usual.largest.size + 2
    reader = Reader.new(target, 1, room, drafter.needs.layers)
    state = drafter.start(text, Session(SamplingParams(), room, target.vocab_size, reader))
    noise = Noise.from_seed(0, 1)

    def draft(policy: TreePolicy) -> Draft:
        return in_pieces(drafter.draft(state, DraftRequest(text, verifier.scheme, policy, noise))[0])[0].draft

    whole, nothing = draft(usual), Draft.nothing(text.last())
    depth, laws = (
        int(whole.tree.topology.height),
        {
            one: torch.full(
                (1, one.tree.tokens.shape[1], target.vocab_size), 1 / target.vocab_size, device=target.device
            )
            for one in (whole, nothing)
        },
    )

    def verify(one: Draft) -> None:
        verifier.verify(one, laws[one], noise).path.tolist()

    tasks = (partial(draft, Chain(1)), partial(draft, usual), partial(verify, whole), partial(verify, nothing))
    samples = timed(dict(enumerate(tasks)), target.device, FEW, _silent)
    short, full, checked, drawn = (median(samples[task]) for task in range(len(tasks)))
    level = max(0.0, full - short) / (depth - 1) if depth > 1 else short
    return max(0.0, short - level), level, max(0.0, checked - drawn)


def _silent(done: int, total: int) -> None:
    """Show nothing."""


def _read(key: str) -> DraftingCosts | None:
    try:
        row = json.loads((cache_folder() / "costs" / f"{key}.json").read_text(encoding="utf-8"))
        passes = tuple((int(count), float(seconds)) for count, seconds in row["passes"])
        found = DraftingCosts(passes, *(float(row[name]) for name in ("start", "level", "verifying")))
        times = [seconds for _, seconds in passes] + [found.start, found.level, found.verifying]
        usable = (
            passes[0][0] == 1 and len(passes) > 1 and passes[0][1] > 0 and 0 <= min(times) <= max(times) < SLOW * 1000
        )
        return found if usable and found.of_steps else None
    except (OSError, ValueError, ArithmeticError, RecursionError, LookupError, TypeError, PolydraftError):
        return None  # it is measured again


def _keep(key: str, found: DraftingCosts | None) -> None:
    """Write what was measured to the cache folder, where that can be written to."""
    if found is None:
        return
    folder = cache_folder() / "costs"
    part = folder / f".{key}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(found)), encoding="utf-8")
        os.replace(part, folder / f"{key}.json")
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@torch.inference_mode()
def time_target(
    model: LanguageModel, tokens: Int[Tensor, "1 t"], most: int, *, rounds: int = ROUNDS, on_progress: Rounds
) -> Curve:
    """Time the target's pass over n = 1 to `most` tree nodes after these tokens.

    All sizes are timed in turn, round after round, so that what else the machine does disturbs them alike.
    """
    sizes = up_to(SIZES, most)
    text = Text(tokens, torch.full_like(tokens[0, :1], tokens.shape[1]))
    reader, _ = reader_of(model, 1, tokens.shape[1] + most).catch_up(text)

    def score(nodes: int) -> None:
        shape = topology(TreeShape(((nodes - 1,),) if nodes > 1 else ()), 1, tokens.device)
        drafted = tokens[:, -1:].expand(1, nodes)
        reader.score(text, TokenTree(drafted, shape, torch.ones_like(drafted, dtype=torch.bool)))

    tasks = {nodes: partial(score, nodes) for nodes in sizes}
    return Curve.through(timed(tasks, model.facts.device, rounds, on_progress))


def up_to(counts: Iterable[int], most: int) -> list[int]:
    """Return the counts below the largest, and that."""
    return [*(count for count in counts if count < most), most]


def timed(
    tasks: Mapping[int, Callable[[], Any]], device: torch.device, rounds: int, on_progress: Rounds
) -> dict[int, list[float]]:
    """Return the seconds of every task in every round, after a round that does not count."""
    samples: dict[int, list[float]] = {count: [] for count in tasks}
    for turn in range(rounds + 1):
        for count, task in tasks.items():
            watch = Stopwatch(device)
            with watch.charge("task"):
                task()
            if turn:
                samples[count].append(watch.seconds["task"])
        on_progress(turn + 1, rounds + 1)
    return samples
