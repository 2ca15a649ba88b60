"""What passes cost on this machine: the target's by tree size, the drafter's by level."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Drafter, DraftRequest, Session
from polydraft.engine.clock import Stopwatch
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import LanguageModel
from polydraft.planning.costs import Curve
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text, reader_of
from polydraft.schemes import Scheme
from polydraft.trees import Chain, Fixed, TokenTree, TreePolicy, TreeShape, Widths, topology

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FRONTIERS = (1, 2, 4, 8, 16, 32)
ROUNDS = 9
LEVELS = 3
"""How many levels of one width are timed at once: their time stands out from the noise of the clock."""
Progress = Callable[[int, int], None]


@torch.inference_mode()
def time_target(
    model: LanguageModel, tokens: Int[Tensor, "1 t"], most: int, *, rounds: int = ROUNDS, on_progress: Progress
) -> Curve:
    """Time the target's pass over n = 1 to `most` tree nodes after these tokens.

    All sizes are timed in turn, round after round, so that what else the machine does disturbs them alike.
    """
    sizes = _up_to(SIZES, most)
    text = Text(tokens, torch.full_like(tokens[0, :1], tokens.shape[1]))
    reader, _ = reader_of(model, 1, tokens.shape[1] + most).catch_up(text)

    def score(nodes: int) -> None:
        shape = topology(TreeShape(((nodes - 1,),) if nodes > 1 else ()), 1, tokens.device)
        drafted = tokens[:, -1:].expand(1, nodes)
        reader.score(text, TokenTree(drafted, shape, torch.ones_like(drafted, dtype=torch.bool)))

    tasks = {nodes: partial(score, nodes) for nodes in sizes}
    return Curve.through(_timed(tasks, model.facts.device, rounds, on_progress))


@torch.inference_mode()
def time_draft(
    drafter: Drafter,
    scheme: Scheme,
    tokens: Int[Tensor, "1 t"],
    vocab_size: int,
    most: int,
    *,
    rounds: int = ROUNDS,
    on_progress: Progress,
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
    for width in _up_to(FRONTIERS, most):
        tasks[width] = partial(draft, Fixed(Widths((width, *(1,) * LEVELS)).shape))
        try:
            tasks[width]()
        except (InvalidParameter, UnpairedScheme):  # a scheme that draws fewer children
            del tasks[width]
            break
    samples = _timed(tasks, tokens.device, rounds, on_progress)
    short = samples.pop(0)
    levels = {
        width: [(whole - root) / LEVELS for whole, root in zip(times, short, strict=True)]
        for width, times in samples.items()
    }
    curve = Curve.through(levels)
    return curve, max(0.0, median(short) - curve(1))


def _up_to(counts: Iterable[int], most: int) -> list[int]:
    return [*(count for count in counts if count < most), most]


def _timed(
    tasks: Mapping[int, Callable[[], None]], device: torch.device, rounds: int, on_progress: Progress
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
