"""What passes and drafts take here and what is accepted: measured at a first call, and kept in the cache folder."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from statistics import mean, median
from threading import RLock, local
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, DraftRequest, NoDraft, Session, drafters_in, owned_models, owned_networks
from polydraft.engine.emission import Stopwatch
from polydraft.engine.loop.batch import Method
from polydraft.engine.run import Run, Setup
from polydraft.engine.target_law import Ending, TargetLaw
from polydraft.errors import PolydraftError, is_whole
from polydraft.fetched import cache_folder
from polydraft.models import HuggingFaceModel, LanguageModel, chosen_precision, module_of
from polydraft.planning.acceptance import RecordingVerifier, Visit, tally
from polydraft.planning.costs import BESIDES, Curve, StepCosts
from polydraft.planning.plan import Machine, ModelIdentity
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text, reader_of
from polydraft.schemes import IID
from polydraft.trees import Acceptance, Chain, Draft, Fixed, TokenTree, TreePolicy, TreeShape, in_pieces, topology
from polydraft.trees.search import Rates
from polydraft.trees.tree import MOST_NODES
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
PATIENCE = 2.0
"""Seconds that texts may take which are written to see what is accepted."""
TEXTS, BEGINNING, SEEN, FEWEST = 6, 6, 16, 4
"""So many texts are watched, behind so many tokens of their own, for so many more; if there is time for so many."""
LENGTHS, ROOM = (KNOWN, 1024, 2048), 8
"""Levels of a view are timed behind so many tokens, where the context has room for so many more."""
STATIC = 3
"""The depth of the static trees whose drafts are timed there, beside those of a single level."""
MOST_CHILDREN = 4
"""Rates are told of nodes with up to so many children."""


@dataclass(frozen=True)
class Measured:
    """What passes and drafts take here, in seconds, and how often drafts were accepted.

    Args:
        passes: the target's passes, by their numbers of tokens.
        start: what a draft takes beyond its levels.
        level: one level of a draft.
        verifying: what verifying a draft takes more than drawing a token.
        rates: those of an `Acceptance`; () where no text was watched, and then nothing is known of what follows.
        tokens: the mean tokens of a step with the usual tree.
        usual: what such a step takes in the middle of a text.
        plain: what a step without drafts takes there.
    """

    passes: tuple[tuple[int, float], ...]
    start: float
    level: float
    verifying: float = 0.0
    rates: Rates = ()
    tokens: float = 1.0
    usual: float = 0.0
    plain: float = 0.0

    @property
    def costs(self) -> StepCosts:
        """The costs of steps with trees of a fixed shape; what all steps take beside them is assumed if unknown."""
        one = self.passes[0][1]
        plain = max(0.0, self.plain - one) if self.rates else BESIDES / 2 * one
        return StepCosts(Curve(self.passes), Curve(((1, self.level),)), self.start, plain + self.verifying, plain)

    @property
    def acceptance(self) -> Acceptance | None:
        """The rates; None where no text was watched."""
        return Acceptance(self.rates) if self.rates else None


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Measured | None]] = WeakKeyDictionary()
_BY_KEY: dict[str, Measured | None] = {}
"""The same by what the times depend on, for models that are loaded anew."""
_LOCK, _BUSY = RLock(), local()
SETTINGS = (int, float, str, type(None))
"""What says how a drafter drafts, beside values that are compared by what is in them, such as sampling settings, and
tuples of such; its networks are told by their weights."""


def measured(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy, temperature: float
) -> Measured | None:
    """Return what was measured, now or before; None where nothing is to be measured, or could be."""
    networks = [module_of(one) for one in owned_models(drafter)] + [*owned_networks(drafter)]
    own = [target.model, *(one for one in networks if one is not None)]
    if any(weight.is_meta for one in own for weight in one.parameters()):
        return None  # weights are brought for each pass, which is dear whatever its width
    near = max(0.5, round(2 * temperature) / 2) if temperature else 0.0
    asked = (_said(verifier, verifier.name), _said(usual, f"{usual.shape}"), near, _settings(drafter))
    here = (*asked, *(one and ref(one) for one in networks))
    known = _KNOWN.setdefault(target.model, {})
    if here in known or getattr(_BUSY, "measuring", False):  # a call from inside a pass that is measured
        return known.get(here)
    with _LOCK:
        if here not in known:
            key = _key(target, networks, asked)
            if key not in _BY_KEY:
                _BY_KEY[key] = _read(key) or _measured(target, Method(drafter, verifier, usual), near)
                _keep(key, _BY_KEY[key])
            gone = [one for one in known if any(isinstance(part, ref) and part() is None for part in one)]
            known |= {here: _BY_KEY[key]}
            for one in gone:  # of models that were loaded for a call
                del known[one]
        return known[here]


def _said(value: object, otherwise: str) -> str:
    """Return what a value says of itself, unless that is where it lies."""
    return otherwise if " at 0x" in repr(value) else repr(value)


def _settings(drafter: Drafter) -> str:
    """Return what drafts depend on beside networks: of a drafter and of those in it."""
    found = drafters_in(drafter)
    plain = [{name: value for name, value in vars(one).items() if _is_setting(value)} for one in found]
    return " ".join(f"{type(one).__qualname__} {own}" for one, own in zip(found, plain, strict=True))


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return isinstance(value, SETTINGS) or (is_dataclass(value) and type(value).__eq__ is not object.__eq__)


def _key(target: HuggingFaceModel, networks: Sequence[nn.Module | None], asked: tuple[object, ...]) -> str:
    """Return a name for all that the times depend on."""
    drafting = [ModelIdentity.of(one, type(one).__name__) for one in networks if one is not None]
    machine = Machine.of_model(target.model)
    own = ModelIdentity.of(target.model, type(target.model).__name__)
    said = (asdict(own), list(map(asdict, drafting)), asdict(machine), target.why_not_fused, asked)
    return f"{crc32(repr(said).encode()):08x}-{own.weights}"


def _measured(target: HuggingFaceModel, method: Method, temperature: float) -> Measured | None:
    """Measure all there is to measure; None where passes are too slow, or nothing can be drafted."""
    _BUSY.measuring = True
    try:
        most = method.policy.most_drafts
        known = max(1, min(KNOWN, target.context - most - 2))
        tokens = (torch.arange(known, device=target.device) % target.vocab_size).unsqueeze(0)
        if time_target(target, tokens, 1, rounds=1, on_progress=_silent)(1) > SLOW:
            return None
        rounds = FEW if target.device.type == "cpu" else ROUNDS  # recorded passes begin after some
        passes = time_target(target, tokens, most + 1, rounds=rounds, on_progress=_silent)
        found = Measured(passes.points, *_drafting(target, method))
        return _watched(target, method, temperature, found)
    except Exception:  # noqa: BLE001  what cannot be drafted says so when a text is begun
        return None
    finally:
        _BUSY.measuring = False


def _watched(target: HuggingFaceModel, method: Method, temperature: float, found: Measured) -> Measured:
    """Let the target write the beginnings of texts, and see what is accepted behind them, and what it takes.

    Drafts in the middle of a text take longer than one after another: they learn from each step, and find the caches of
    the processor full of the target.
    """
    count = min(SEEN, int(PATIENCE / found.passes[0][1] / TEXTS))
    if target.encodes or count < FEWEST or target.context < 1 + BEGINNING + count:
        return found
    watched, first = RecordingVerifier(method.verifier), method.policy.shape.counts[:1]
    deeper = min(STATIC, method.policy.shape.depth)
    ways = {
        "plain": Method(NoDraft(), method.verifier, Chain(1)),
        "usual": replace(method, verifier=watched),
        "flat": replace(method, policy=Fixed(TreeShape(first))),
        "deep": replace(method, policy=Fixed(TreeShape(first + ((1,),) * (deeper - 1)))),
    }
    token: Any = getattr(target.model.generation_config, "bos_token_id", None)
    token = token if is_whole(token) and 0 <= token < target.vocab_size else 0
    text, visits = torch.full((1, 1), token, device=target.device), list[Visit]()
    tokens: list[int] = []  # of each step but a text's last one, which is cut
    steps: dict[str, list[StepSeconds]] = {way: [] for way in ways}
    for seed in range(TEXTS):
        run = _run(target, ways["plain"], text, SamplingParams(), BEGINNING, seed)
        steps["plain"].extend(timed_steps(run))
        begun = run.sequences(text, 0)
        run, before = _run(target, ways["usual"], begun, SamplingParams(temperature), count, seed), 0
        for seconds in timed_steps(run):
            steps["usual"].append(seconds)
            visits.extend(watched.visits())
            if not run.over:
                tokens.append(run.statistics.new_tokens - before)
                before = run.statistics.new_tokens
        static = "flat" if seed % 2 else "deep"
        run = _run(target, ways[static], begun, SamplingParams(temperature), count // 2, seed)
        steps[static].extend(timed_steps(run))
    if not visits or not tokens:
        return found
    middle = {way: StepSeconds(*map(median, zip(*seconds, strict=True))) for way, seconds in steps.items()}
    level = (middle["deep"].draft - middle["flat"].draft) / (deeper - 1) if deeper > 1 else found.level
    children = min(MOST_CHILDREN, method.policy.largest.max_children)
    return replace(
        found,
        start=max(0.0, middle["flat"].draft - max(0.0, level)),
        level=max(0.0, level),
        verifying=max(0.0, middle["flat"].beside - middle["plain"].beside),
        rates=tally(method.verifier, visits, children).rates().rates,
        tokens=mean(tokens),
        usual=sum(middle["usual"]),
        plain=sum(middle["plain"]),
    )


def _run(
    target: HuggingFaceModel, method: Method, text: Int[Tensor, "1 t"], params: SamplingParams, count: int, seed: int
) -> Run:
    """Return a run that continues a text by so many tokens, whatever they are."""
    prompt = Text(text, torch.full_like(text[0, :1], text.shape[1]))
    setup = Setup(target, method, prompt, (TargetLaw(params),), (Ending(text.shape[1] + count),), time=True)
    return Run(setup, Noise.from_seed(seed, 1))


class StepSeconds(NamedTuple):
    """The seconds of a step: drafting, the target's pass, and all beside."""

    draft: float
    target: float
    beside: float


def timed_steps(run: Run) -> Iterator[StepSeconds]:
    """Generate, and return the seconds of every step; reading the prompt is not counted."""
    before: dict[str, float] = {}
    for _ in run:
        spent = {name: value - before.get(name, 0.0) for name, value in run.statistics.seconds.items()}
        before = run.statistics.seconds
        draft, target, prompt = (spent.get(name, 0.0) for name in ("draft", "target", "prefill"))
        yield StepSeconds(draft, target, spent["total"] - draft - target - prompt)


@torch.no_grad()
def _drafting(target: HuggingFaceModel, method: Method) -> tuple[float, float, float]:
    """Time drafts of one level and of the usual tree, behind a text of one token, and what verifying takes."""
    drafter, verifier, usual = method.drafter, method.verifier, method.policy
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


@dataclass(frozen=True)
class RelativeLevels:
    """What a level of a view's drafts costs in passes of the target, by how many tokens are known.

    Beyond the lengths that were timed both go on as between the last two: those over all keys rise, those over few keys
    do not.

    Args:
        passes: the target's pass over one token, by known tokens.
        levels: the same of a level.
    """

    passes: Curve
    levels: Curve

    def __call__(self, known: int) -> float:
        """Return the cost behind so many tokens."""
        near = max(known, self.passes.points[0][0])
        return self.levels(near) / self.passes(near)


_LEVELS = WeakKeyDictionary[nn.Module, dict[str, RelativeLevels | None]]()


def relative_levels(target: HuggingFaceModel, drafter: Drafter) -> RelativeLevels | None:
    """Return what was measured of a view's levels, now or before; None of other drafters, or where nothing could be."""
    view = drafter.needs.target and target.facts.branches and not owned_networks(drafter)
    unmeasured = os.environ.get(VARIABLE) == "no" or chosen_precision(target.device)
    if not view or unmeasured or getattr(_BUSY, "measuring", False):
        return None
    known, said = _LEVELS.setdefault(target.model, {}), _settings(drafter)
    with _LOCK:
        if said not in known:
            key = _key(target, [], ("levels", said))
            known[said] = found = _read_levels(key) or _timed_levels(target, drafter)
            if found is not None:
                _write(key, asdict(found))
        return known[said]


def _read_levels(key: str) -> RelativeLevels | None:
    try:
        row = _row(key)
        passes, levels = (
            Curve(tuple((int(count), float(seconds)) for count, seconds in row[name]["points"]))
            for name in ("passes", "levels")
        )
        return RelativeLevels(passes, levels) if passes.points[0][1] > 0 else None
    except (ValueError, LookupError, TypeError, PolydraftError):
        return None  # it is measured again


@torch.inference_mode()
def _timed_levels(target: HuggingFaceModel, drafter: Drafter) -> RelativeLevels | None:
    """Time passes and levels behind texts of several lengths, whose keys are those of a short one again and again."""
    _BUSY.measuring = True
    try:
        short = torch.arange(KNOWN, device=target.device).unsqueeze(0) % target.vocab_size
        begun = reader_of(target, 1, KNOWN + 1).catch_up(Text(short, torch.tensor([KNOWN])))[0]
        tasks = dict[int, Callable[[], Any]]()
        for known in (one for one in LENGTHS if one + ROOM <= target.context):
            tasks[known], tasks[-known] = _behind(target, drafter, begun, known)
        samples = timed(tasks, target.device, FEW, _silent)
        curves = [Curve.through({n: samples[sign * n] for n in tasks if n > 0}) for sign in (1, -1)]
        return RelativeLevels(*curves)
    except Exception:  # noqa: BLE001  what cannot be drafted says so when a text is begun
        return None
    finally:
        _BUSY.measuring = False


def _behind(
    target: HuggingFaceModel, drafter: Drafter, begun: Reader, known: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what takes a pass, and a level of a draft, behind a text of so many tokens."""
    cache, slots = target.new_cache(1, known + ROOM), torch.arange(known, device=target.device)
    cache.take(0, cast(Any, begun.cache), [slots.unsqueeze(0) % (KNOWN - 1)], slots % (KNOWN - 1), 0)
    reader = Reader(target, cache, (known - 1,))
    text = Text(torch.zeros(1, known, dtype=torch.int64, device=target.device), torch.tensor([known]))
    state = drafter.start(text, Session(SamplingParams(), known + ROOM, target.vocab_size, reader))
    alone = Draft.nothing(text.last()).tree
    request = DraftRequest(text, IID(), Chain(1), Noise.from_seed(0, 1), reader)
    state = drafter.draft(state, request)[1]  # which chooses keys
    return partial(reader.score, text, alone), partial(drafter.draft, state, request)


def _silent(done: int, total: int) -> None:
    """Show nothing."""


def _row(key: str) -> Any:
    """Return what was kept under a name; None where nothing was, or it cannot be read."""
    try:
        return json.loads((cache_folder() / "costs" / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _read(key: str) -> Measured | None:
    try:
        row = _row(key)
        passes = tuple((int(count), float(seconds)) for count, seconds in row["passes"])
        rates = tuple(tuple(tuple(map(float, one)) for one in depth) for depth in row["rates"])
        times = {name: float(row[name]) for name in ("start", "level", "verifying", "usual", "plain")}
        found = Measured(passes, **times, rates=rates, tokens=float(row["tokens"]))
        seconds = [seconds for _, seconds in passes] + [*times.values()]
        usable = passes[0][0] == 1 and len(passes) > 1 and passes[0][1] > 0 and 1 <= found.tokens < MOST_NODES
        usable = usable and 0 <= min(seconds) <= max(seconds) < SLOW * 1000
        return found if usable and found.costs and (found.acceptance or True) else None
    except (OSError, ValueError, ArithmeticError, RecursionError, LookupError, TypeError, PolydraftError):
        return None  # it is measured again


def _keep(key: str, found: Measured | None) -> None:
    """Write what was measured to the cache folder, where that can be written to."""
    if found is not None:
        _write(key, asdict(found))


def _write(key: str, told: object) -> None:
    folder = cache_folder() / "costs"
    part = folder / f".{key}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(told), encoding="utf-8")
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
