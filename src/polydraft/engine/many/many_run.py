"""Many texts in progress: each slot takes the next prompt as soon as its text has ended."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, owned_models
from polydraft.engine.choices import (
    Choices,
    check_crowd,
    chosen_method,
    with_hugging_faces_words,
)
from polydraft.engine.emission import Emission, Statistics, names_of
from polydraft.engine.generate import target_model
from polydraft.engine.loop.batch import Method, check_drafting
from polydraft.engine.loop.forced import MOST_FORCED
from polydraft.engine.loop.step import room_for
from polydraft.engine.many.asked import (
    LARGEST_SEED,
    Completed,
    Prompt,
    PromptRequest,
    asked_prompts,
    checked_prompt,
    longest_text,
    request_for,
    with_methods,
)
from polydraft.engine.many.running import RunningBatch, RunningStep
from polydraft.engine.run import Observer
from polydraft.engine.target_law import TargetLaw, warn_of_context
from polydraft.errors import ContextOverflow, InvalidParameter, UnsupportedModel
from polydraft.models import (
    OF_DECODERS,
    OF_ONE_CALL,
    HuggingFaceModel,
    check_arguments,
    check_memory,
    drafting_asked_for,
    own_inputs,
    require_count,
)
from polydraft.trees import TreePolicy, TreeShape
from polydraft.verifiers import NodeVerifier, TreeVerifier


@dataclass(frozen=True, eq=False)
class ManySetup:
    """Everything that determines a run over many prompts.

    Args:
        target: the model.
        method: what drafts and verifies.
        law: of a prompt without options of its own; for its sampling settings the drafter drafts.
        options: Hugging Face's generation arguments that the prompts have in common.
        size: the number of slots.
        capacity: key slots of each.
        asked: the prompts that can be continued.
        refused: those that cannot, with the reason.
        logprobs: how many of the likeliest tokens are told with each token; None for no log-probabilities at all.
        time: whether the parts of a step are timed on a GPU too.
    """

    target: HuggingFaceModel
    method: Method
    law: TargetLaw
    options: Mapping[str, Any]
    size: int
    capacity: int
    asked: tuple[PromptRequest, ...]
    refused: tuple[Completed, ...]
    logprobs: int | None = None
    time: bool = False


class ManyRun:
    """Iterate over completed texts, in the order in which they end; `statistics` grows with every step.

    A text depends on its prompt, its options and its seed alone, not on the batch size or its neighbours. Stopping
    early loses nothing that was yielded. After an interrupt or an error, wherever it came from, the run goes on when it
    is asked again, and every text is still yielded once; an error that lasts is raised again. Whoever wants the floor
    between steps, for a progress bar or to stop in good order, calls `step` until the run is `over`.
    """

    def __init__(self, setup: ManySetup) -> None:
        self.setup = setup
        rules = [setup.method.verifier, *(one.method.verifier for one in setup.asked if one.method)]
        self.statistics = Statistics(
            in_force=setup.law.in_force,
            verifier=names_of([one.name for one in rules]),
            lossless=all(one.lossless for one in rules),
        )
        self._asked = {one.name: one for one in setup.asked}
        self._gains: dict[Hashable, list[Emission]] = {}  # of the texts in progress, step by step
        self._ended = _Ended(texts=setup.refused)
        self._learnt = 0
        self._cut = False  # whether a text was cut by the context, of which nobody was told yet
        self._observer = Observer(setup.target, logprobs=setup.logprobs, time=setup.time)
        self._batch = self._open() if setup.asked else None

    @property
    def over(self) -> bool:
        """Whether every text has ended and was handed over."""
        return not (self._ended.left or self._goes_on())

    def step(self) -> list[Completed]:
        """Let prompts join, take one step, and return the texts that have ended since the last call."""
        if self._batch is not None and self._goes_on():
            self._advance(self._batch)
        ended, after = [*self._ended.waiting], self._ended.without(self._ended.left)
        self._ended = after  # last: no signal comes between this and the return, so a text is handed over once
        return ended

    def __iter__(self) -> Iterator[Completed]:
        return self

    def __next__(self) -> Completed:
        while not self._ended.left:
            if self._batch is None or not self._goes_on():
                self._tell_of_context()
                raise StopIteration
            self._advance(self._batch)
        text, after = self._ended.texts[self._ended.handed], self._ended.without(1)
        self._ended = after  # last, likewise
        return text

    def _tell_of_context(self) -> None:
        if self._cut:
            self._cut = False
            warn_of_context(self.setup.target.context)

    def _open(self) -> RunningBatch:
        setup, observer = self.setup, self._observer
        method = observer.watched(setup.method)
        longest = max(len(one.tokens) for one in setup.asked)
        observer.opens(method, longest, setup.capacity - longest, setup.size, setup.law)
        fixed = setup.law.params
        return RunningBatch(setup.target, method, setup.size, setup.capacity, fixed=fixed, observer=observer)

    def _goes_on(self) -> bool:
        """Tell whether a prompt waits, a text is in progress, or a step was taken and not noted."""
        batch, noted = self._batch, self._ended.steps
        return batch is not None and bool(
            self._next(batch) < len(self.setup.asked) or batch.batch.going or (batch.last and batch.last.number > noted)
        )

    def _next(self, batch: RunningBatch) -> int:
        """Return the place of the next prompt: all before it have joined or were refused."""
        return batch.joined + self._ended.refused

    def _advance(self, batch: RunningBatch) -> None:
        """Take a step, unless the last is still to be noted, and note it."""
        if batch.last is None or batch.last.number == self._ended.steps:
            with self._observer.counting(self.statistics):
                batch.sweep()
                while batch.free and self._next(batch) < len(self.setup.asked):
                    self._join(batch, self.setup.asked[self._next(batch)])
                batch.step()
        if batch.last is not None and batch.last.number > self._ended.steps:
            self._note(batch.last)

    def _join(self, batch: RunningBatch, asked: PromptRequest) -> None:
        """Give a prompt a row, or note why that cannot be."""
        try:
            request = request_for(self.setup.target, asked, self.setup.options)
            batch.join(replace(request, method=asked.method))
        except (ContextOverflow, InvalidParameter, UnsupportedModel) as error:
            if not isinstance(error, ContextOverflow) and not self._reads_more(asked):
                raise
            refused = Completed(asked.name, finish="refused", error=str(error), seed=asked.seed)
            self._ended = self._ended.with_refused(refused)

    def _reads_more(self, asked: PromptRequest) -> bool:
        """Tell whether a prompt has images or an encoder's input, which only the model's own code can check."""
        target = self.setup.target
        return target.encodes or bool(asked.own.keys() & own_inputs(target.model))

    def _note(self, last: RunningStep) -> None:
        """Count a step, once however often this is called before it is through."""
        rows = [(last.texts[row], last.steps[row], gained) for row, gained in last.block.rows.items()]
        texts = [(text, count, gained) for text, count, gained in rows if text is not None]
        if self.statistics.steps < last.number:
            read = sum(len(text.tokens) for text, count, _ in texts if count == 1)
            self.statistics.add(last.block, prompt_read=read)
        for text, count, gained in texts:
            self._gains.setdefault(text.name, [])[count - 1 :] = [gained]
        if self._learnt < last.number:
            self._observer.note(last.block, self.statistics)
            self._learnt = last.number
            self._observer.learn(last.block)
        names = [text.name for text, _, gained in texts if gained.finish]
        self._ended = self._ended.with_texts(last.number, [self._completed(name) for name in names])
        self._cut |= any(gained.finish == "context" for _, _, gained in texts)
        for name in names:
            self._gains.pop(name, None)

    def _completed(self, name: Hashable) -> Completed:
        gains = self._gains[name]
        return Completed(
            name,
            tokens=[token for gained in gains for token in gained.tokens],
            finish=gains[-1].finish,
            target_calls=len(gains),
            accepted=sum(gained.accepted for gained in gains),
            seed=self._asked[name].seed,
            logprobs=tuple(one for gained in gains for one in gained.logprobs),
            verifier=gains[-1].verifier,
            lossless=gains[-1].lossless,
        )


@dataclass(frozen=True)
class _Ended:
    """The texts that have ended and what is known of them; every change takes its place at once, or not at all.

    Args:
        texts: those that were noted last.
        handed: how many of these were handed over.
        steps: how many steps were noted.
        refused: how many prompts were refused when it was their turn.
    """

    texts: tuple[Completed, ...] = ()
    handed: int = 0
    steps: int = 0
    refused: int = 0

    @property
    def left(self) -> int:
        """How many texts are to be handed over."""
        return len(self.texts) - self.handed

    @property
    def waiting(self) -> tuple[Completed, ...]:
        """The texts to hand over."""
        return self.texts[self.handed :]

    def without(self, count: int) -> "_Ended":
        """Return what is left after the first were handed over."""
        return replace(self, handed=self.handed + count)

    def with_refused(self, refused: Completed) -> "_Ended":
        """Add a prompt that was refused."""
        return replace(self, texts=(*self.waiting, refused), handed=0, refused=self.refused + 1)

    def with_texts(self, step: int, ended: Sequence[Completed]) -> "_Ended":
        """Add the texts that ended with a step."""
        return replace(self, texts=(*self.waiting, *ended), handed=0, steps=step)


def generate_many(
    model: nn.Module,
    prompts: Mapping[Any, Prompt] | Sequence[Prompt] | Sequence[int] | Int[Tensor, "..."] | np.ndarray,
    *,
    batch_size: int = 8,
    drafter: Drafter | nn.Module | str | Path | None = None,
    verifier: TreeVerifier | NodeVerifier | str | None = None,
    policy: TreePolicy | TreeShape | Sequence[int] | str | int | None = None,
    seed: int | None = None,
    per_prompt: Mapping[Any, Mapping[str, Any]] | None = None,
    compile: bool = False,
    output_logprobs: int | None = None,
    time: bool = False,
    **options: Any,
) -> ManyRun:
    """Continue many prompts in one running batch, and return an iterator over the texts as they end.

    Every text is the one that its prompt gets alone with the seed that comes with it (`Completed.seed`), up to the
    rounding of a batch's arithmetic. That seed follows from `seed` and the prompt's name, so that the text does not
    depend on the other prompts, their order or the batch size.

    Args:
        model: a Hugging Face causal model, the target.
        prompts: token ids, as tensors or lists, by name, or a list of these, whose names are their places. Names are
            numbers or texts; the seeds of prompts with other names follow from their places. A prompt may also be what
            a tokenizer or `apply_chat_template` returns, and so may all of them together; padding is left out.
        batch_size: texts in progress at a time.
        drafter: as for `generate`.
        verifier: as for `generate`, where the default follows from the options of all prompts, not those of one.
        policy: likewise.
        seed: fixes the texts.
        per_prompt: by name, options that a prompt has instead of the common ones; `seed` among them is its own seed,
            and `drafter`, `verifier`, `policy` and `prediction` are its own too.
        output_logprobs: as for `generate`; a `Completed` has them.
        time: as for `generate`.
        compile: as for `generate`; the batch keeps its shape whatever joins and leaves.
        **options: Hugging Face's generation arguments, and `grammar`, also of one prompt in `per_prompt`.

    Raises:
        InvalidParameter: batch_size below 1 or too large for the memory, an option outside its range, or options for a
            prompt that there is not. A prompt that cannot be continued is no error of the run: it is yielded, with the
            reason, and if that is its length, first.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
    """
    require_count("batch_size", batch_size)
    choices = Choices(drafter, verifier, policy, compile=compile, output_logprobs=output_logprobs, time=time)
    target = target_model(model, compile=compile)
    check_arguments(target.model, options, OF_ONE_CALL)
    shared = sorted((own_inputs(target.model) - OF_DECODERS) & options.keys())
    if shared:
        raise InvalidParameter(f"{shared[0]} belongs to one prompt; give it with that prompt, as a mapping.")
    choices = with_hugging_faces_words(choices, drafting_asked_for(options, target.model.generation_config))
    start = int(torch.randint(LARGEST_SEED, ())) if seed is None else seed
    own_options = {} if per_prompt is None else per_prompt
    tried = [checked_prompt(target, one) for one in asked_prompts(target, prompts, start, own_options)]
    asked = tuple(one for one in tried if isinstance(one, PromptRequest))
    refused = tuple(one for one in tried if isinstance(one, Completed))
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    law = request_for(target, PromptRequest("", token, 0, {}), options).law if asked else TargetLaw()
    method = chosen_method(choices, target, law.params)
    asked = with_methods(asked, choices, target, law, method, options)
    every = [method, *(one.method for one in asked if one.method)]
    for one in every:
        check_crowd(target, one.drafter, together=True)
        check_drafting(one)
    size = min(batch_size, len(asked))
    spare = MOST_FORCED * any(one.get("grammar") is not None for one in (options, *own_options.values()))
    capacity = longest_text(target, asked, options) + room_for(every) + spare
    if asked:
        models = {id(model): model for one in every for model in owned_models(one.drafter)}
        check_memory([target, *models.values()], size, capacity)
    return ManyRun(ManySetup(target, method, law, options, size, capacity, asked, refused, output_logprobs, time))
