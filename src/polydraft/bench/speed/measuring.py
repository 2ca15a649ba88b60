"""Measure arms side by side: warm-up, rounds in which all arms take turns, the clock, memory and equality of texts."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch import nn

from polydraft.bench.environment import load, now, peak_memory, reset_peak_memory
from polydraft.bench.prompts import Prompt, in_turn
from polydraft.bench.prompts.prompt import encode, seed_of
from polydraft.bench.speed.arms import PLAIN, Arm, PromptBatch
from polydraft.bench.speed.equality import compare_texts
from polydraft.bench.speed.records import SpeedRecord, taking_part
from polydraft.bench.speed.replay import Replay, check_known, end_of, known_ids
from polydraft.bench.speed.schedule import Round, RoundKey, SpeedSettings, rounds
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import HuggingFaceModel, Pair


def check_arms(arms: Sequence[Arm], settings: SpeedSettings) -> None:
    """Check that the arms can be compared.

    Raises:
        InvalidParameter: two arms share a name, none is plain decoding, or one can do none of the batch sizes.
    """
    names = [arm.name for arm in arms]
    if len({*names}) < len(names):
        raise InvalidParameter(f"Two arms have the same name: {', '.join(names)}; give one another name.")
    if PLAIN not in names:
        raise InvalidParameter(f"There is no arm {PLAIN!r}, which the others are compared with.")
    for arm in arms:
        if arm.most_rows is not None and arm.most_rows < min(settings.batch_sizes):
            raise InvalidParameter(
                f"The arm {arm.name} does batches of at most {arm.most_rows}; leave it out or measure that size too."
            )


def prompts_that_fit(pair: Pair, prompts: Sequence[Prompt], settings: SpeedSettings) -> list[Prompt]:
    """Return the prompts that leave room for all new tokens in both models' contexts, tasks taking turns.

    Raises:
        ContextOverflow: none does.
    """
    check_known(prompts, replay=settings.replay)
    models = [pair.target, pair.draft] if isinstance(pair.draft, nn.Module) else [pair.target]
    room = min(HuggingFaceModel(model).context for model in models)

    def most(prompt: Prompt) -> int:
        own = 1 + len(known_ids(pair, prompt.edited)) if settings.replay else settings.max_new_tokens
        return min(own, settings.max_new_tokens)

    good = [one for one in prompts if 0 < encode(pair, one, settings.excerpt_tokens).shape[1] <= room - most(one)]
    if not good:
        new = "its text" if settings.replay else f"{settings.max_new_tokens} new tokens"
        raise ContextOverflow(f"None of the {len(prompts)} prompts leaves room for {new}.")
    return in_turn(good)


def batch_of(pair: Pair, prompts: Sequence[Prompt], settings: SpeedSettings) -> PromptBatch:
    """Return prompts as all arms get them, with their known texts and files.

    Raises:
        InvalidParameter: texts are replayed, and the target names no token that ends them, or two of them stand behind
            one prompt.
    """
    batch = PromptBatch.of([encode(pair, one, settings.excerpt_tokens) for one in prompts], settings.ends)
    if all(one.file for one in prompts):
        batch = replace(batch, files=tuple(known_ids(pair, one.file) for one in prompts))
    if not settings.replay:
        return batch
    texts, names = [known_ids(pair, one.edited) for one in prompts], [f"{one.name!r} of {one.task}" for one in prompts]
    return replace(batch, replay=Replay(batch.input_ids, texts, end_of(pair.target), names))


def measure_speed(
    pair: Pair, arms: Sequence[Arm], prompts: Sequence[Prompt], settings: SpeedSettings, done: Collection[RoundKey] = ()
) -> Iterator[list[SpeedRecord]]:
    """Measure all rounds but those that are done; the runs of a round come when it is finished.

    Raises:
        InvalidParameter: arms that cannot be compared, too few prompts for a batch size, or texts of one batch that
            cannot be replayed.
    """
    check_arms(arms, settings)
    every = rounds(prompts, settings)
    check_batches(pair, every, settings)
    yield from measure_rounds(pair, arms, [one for one in every if one.key not in done], settings, set())


def check_batches(pair: Pair, every: Sequence[Round], settings: SpeedSettings) -> None:
    """Check before anything is measured that texts can be replayed.

    Raises:
        InvalidParameter: those of one batch cannot.
    """
    for one in every if settings.replay else ():
        batch_of(pair, one.prompts, settings)


def measure_rounds(
    pair: Pair, arms: Sequence[Arm], due: Sequence[Round], settings: SpeedSettings, warm: set[tuple[float, int]]
) -> Iterator[list[SpeedRecord]]:
    """Measure rounds.

    Before the first round of a temperature and batch size that are not `warm` every arm runs once, for a few tokens,
    without being measured; then they are.
    """
    for one in due:
        part = taking_part(arms, len(one.prompts))
        batch = batch_of(pair, one.prompts, settings)
        if (one.temperature, len(one.prompts)) not in warm:
            warm.add((one.temperature, len(one.prompts)))
            for arm in part:
                arm.run(batch, one.temperature, settings.warm_up_tokens, settings.seed)
        yield measure_round(pair, part, one, batch, settings)


def measure_round(
    pair: Pair, arms: Sequence[Arm], one: Round, batch: PromptBatch, settings: SpeedSettings
) -> list[SpeedRecord]:
    """Run every arm once on a batch, in the round's own order, and compare the texts if they must be equal."""
    turns = one.order(len(arms), settings.seed)
    runs = [measure_run(arms[number], one, turn, batch, settings) for turn, number in enumerate(turns)]
    if one.temperature > 0:
        return runs
    model, prompts = HuggingFaceModel(pair.target), [batch.row(row) for row in range(len(one.prompts))]
    plain = next(run for run in runs if run.arm == PLAIN)
    found = [tuple(compare_texts(model, prompts, plain.tokens, run.tokens)) for run in runs]
    return [
        replace(run, same_text=not differences, differences=differences)
        for run, differences in zip(runs, found, strict=True)
    ]


def measure_run(arm: Arm, one: Round, turn: int, batch: PromptBatch, settings: SpeedSettings) -> SpeedRecord:
    """Run one arm on a batch against the clock."""
    device, busy = batch.input_ids.device, load()
    seed = seed_of(one.prompts[0], settings.seed) + one.repeat
    reset_peak_memory(device)
    begin = now(device)
    generated = arm.run(batch, one.temperature, batch.room(settings.max_new_tokens), seed)
    seconds = now(device) - begin
    return SpeedRecord(
        arm=arm.name,
        task=one.prompts[0].task,
        prompts=tuple(prompt.name for prompt in one.prompts),
        temperature=one.temperature,
        repeat=one.repeat,
        turn=turn,
        seconds=seconds,
        tokens=generated.tokens,
        statistics=generated.statistics,
        setup=generated.setup,
        memory=peak_memory(device),
        load=busy,
        same_text=None,
        differences=(),
    )
