"""Many texts through one running batch: each slot takes the next prompt as soon as its text has ended."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, EnsembleDrafter, ModelDrafter
from polydraft.engine.block import Emission, Statistics
from polydraft.engine.calls.choices import (
    Choices,
    chosen_drafter,
    chosen_policy,
    chosen_verifier,
    with_hugging_faces_words,
)
from polydraft.engine.decode import check_drafting
from polydraft.engine.defaults import default_policy, default_verifier, target_model
from polydraft.engine.generate import row_laws, row_limits
from polydraft.engine.slots import Request, Round, Slots
from polydraft.engine.target_law import TargetLaw
from polydraft.engine.wrappers.watched import Watched
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import (
    OF_ONE_CALL,
    HuggingFaceModel,
    Serial,
    check_arguments,
    check_memory,
    check_prompts,
    copied_criterion,
    drafting_asked_for,
    one_row,
    prepare_by_hugging_face,
    prompts_by_name,
    require_count,
    take_apart,
)
from polydraft.probs import Noise
from polydraft.trees import TreePolicy, TreeShape, largest_shape
from polydraft.verifiers import NodeVerifier, TreeVerifier

Prompt = Int[Tensor, "..."] | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
"""One prompt: a row of token ids, or what a tokenizer or a chat template returns."""
LARGEST_SEED = 2**62
NAMES_BYTES = 4
"""A name becomes a number of this many bytes: from small seeds come seeds below 2^53, that JSON readers keep."""


@dataclass
class Completed:
    """What became of one prompt.

    Args:
        name: its name, or its place among the prompts.
        tokens: the new tokens.
        finish: why the text ended: "eos", "stop", "length" or "context"; "refused" if it was never begun.
        error: why it was refused; else empty.
        target_calls: the target's passes that this text took part in, after its prompt.
        accepted: how many of the tokens were drafted.
        seed: its own seed: `generate` with it, and with the drafter, verifier and policy of this run, gives this text.
    """

    name: Hashable
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    target_calls: int = 0
    accepted: int = 0
    seed: int = 0

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call, the next token included; NaN for a text that was refused."""
        return len(self.tokens) / self.target_calls if self.target_calls else float("nan")


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt that waits: its name, its tokens, its own seed, and options that it has instead of the common ones."""

    name: Hashable
    tokens: Int[Tensor, " t"]
    seed: int
    own: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ManySetup:
    """Everything that determines a run over many prompts.

    Args:
        target: the model.
        drafter: proposes token trees.
        verifier: decides what to keep of them.
        policy: the trees' shape.
        law: of a prompt without options of its own; for its sampling settings the drafter drafts.
        options: Hugging Face's generation arguments that the prompts have in common.
        size: the number of slots.
        capacity: key slots of each.
        asked: the prompts that can be continued.
        refused: those that cannot, with the reason.
    """

    target: HuggingFaceModel
    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    law: TargetLaw
    options: Mapping[str, Any]
    size: int
    capacity: int
    asked: tuple[Asked, ...]
    refused: tuple[Completed, ...]


class ManyRun:
    """Iterate over completed texts, in the order in which they end; `statistics` grows with every step.

    A text depends on its prompt, its options and its seed alone, not on the batch size or its neighbours. Stopping
    early loses nothing that was yielded. After an interrupt or an error, wherever it came from, the run goes on when it
    is asked again, and every text is still yielded once; an error that lasts is raised again. Whoever wants the floor
    between steps, for a progress bar or to stop in good order, calls `step` until the run is `over`.
    """

    def __init__(self, setup: ManySetup) -> None:
        self.setup = setup
        self.statistics = Statistics(in_force=setup.law.in_force)
        self._asked = {one.name: one for one in setup.asked}
        self._gains: dict[Hashable, list[Emission]] = {}  # of the texts in progress, step by step
        self._ended = _Ended(texts=setup.refused)
        self._learnt = 0
        self._watched = Watched(setup.target, setup.drafter, setup.verifier, setup.policy)
        self._slots = self._open() if setup.asked else None

    @property
    def over(self) -> bool:
        """Whether every text has ended and was handed over."""
        return not (self._ended.left or self._goes_on())

    def step(self) -> list[Completed]:
        """Let prompts join the free slots, take one step, and return the texts that have ended since the last call."""
        if self._slots is not None and self._goes_on():
            self._advance(self._slots)
        ended, after = [*self._ended.waiting], self._ended.without(self._ended.left)
        self._ended = after  # last: no signal comes between this and the return, so a text is handed over once
        return ended

    def __iter__(self) -> Iterator[Completed]:
        return self

    def __next__(self) -> Completed:
        while not self._ended.left:
            if self._slots is None or not self._goes_on():
                raise StopIteration
            self._advance(self._slots)
        text, after = self._ended.texts[self._ended.handed], self._ended.without(1)
        self._ended = after  # last, likewise
        return text

    def _open(self) -> Slots:
        setup = self.setup
        longest = max(len(one.tokens) for one in setup.asked)
        self._watched.opens(longest, setup.capacity - longest, setup.size, setup.law.params.temperature > 0)
        return Slots(self._watched.method, setup.size, setup.capacity, setup.law.params)

    def _goes_on(self) -> bool:
        """Tell whether a prompt waits, a text is in progress, or a step was taken and not noted."""
        slots, noted = self._slots, self._ended.steps
        return slots is not None and bool(
            self._next(slots) < len(self.setup.asked) or slots.requests or (slots.last and slots.last.number > noted)
        )

    def _next(self, slots: Slots) -> int:
        """Return the place of the next prompt: all before it have joined or were refused."""
        return slots.joined + self._ended.refused

    def _advance(self, slots: Slots) -> None:
        """Take a step, unless the last is still to be noted, and note it."""
        if slots.last is None or slots.last.number == self._ended.steps:
            with self._watched.counting(self.statistics):
                while slots.free and self._next(slots) < len(self.setup.asked):
                    self._join(slots, self.setup.asked[self._next(slots)])
                if slots.requests:
                    slots.step()
        if slots.last is not None and slots.last.number > self._ended.steps:
            self._note(slots.last)

    def _join(self, slots: Slots, asked: Asked) -> None:
        """Score a prompt in a free slot, or note why that cannot be."""
        try:
            slots.join(_request(self.setup.target, asked, self.setup.options))
        except ContextOverflow as error:
            refused = Completed(asked.name, finish="refused", error=str(error), seed=asked.seed)
            self._ended = self._ended.with_refused(refused)

    def _note(self, last: Round) -> None:
        """Count a step, once however often this is called before it is through."""
        if self.statistics.steps < last.number:
            begun = (request for slot, request in last.requests.items() if last.steps[slot] == 1)
            self.statistics.add(last.block, prompt_read=sum(len(request.tokens) for request in begun))
        for slot, gained in last.block.rows.items():
            gains = self._gains.setdefault(last.requests[slot].name, [])
            gains[last.steps[slot] - 1 :] = [gained]
        if self._learnt < last.number:
            self._learnt = last.number
            self._watched.learn(last.block)
        names = [last.requests[slot].name for slot, gained in last.block.rows.items() if gained.finish]
        self._ended = self._ended.with_texts(last.number, [self._completed(name) for name in names])
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
        per_prompt: by name, options that a prompt has instead of the common ones; `seed` among them is its own seed.
        compile: as for `generate`; the batch keeps its shape whatever joins and leaves.
        **options: Hugging Face's generation arguments.

    Raises:
        InvalidParameter: batch_size below 1 or too large for the memory, an option outside its range, or options for a
            prompt that there is not. A prompt that cannot be continued is no error of the run: it is yielded, with the
            reason, and if that is its length, first.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
    """
    require_count("batch_size", batch_size)
    choices = Choices(drafter, verifier, policy, compile=compile)
    target = target_model(model, compile=compile)
    check_arguments(model, options, OF_ONE_CALL)
    choices = with_hugging_faces_words(choices, drafting_asked_for(options, target.model.generation_config))
    chosen = chosen_drafter(choices.drafter, target, compile=compile)
    start = int(torch.randint(LARGEST_SEED, ())) if seed is None else seed
    tried = [_checked(target, one) for one in _asked(target, prompts, start, per_prompt or {})]
    asked = tuple(one for one in tried if isinstance(one, Asked))
    refused = tuple(one for one in tried if isinstance(one, Completed))
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    law = _request(target, Asked("", token, 0, {}), options).law if asked else TargetLaw()
    params = law.params
    rule = chosen_verifier(choices.verifier, chosen) or default_verifier(chosen, params)
    shape = chosen_policy(choices.policy) or default_policy(chosen, params)
    check_drafting(chosen, rule, shape)
    size = min(batch_size, len(asked))
    capacity = _longest(target, asked, options) + largest_shape(shape).size + 1
    if asked:
        check_memory([target, *_models_of(chosen)], size, capacity)
    return ManyRun(ManySetup(target, chosen, rule, shape, law, options, size, capacity, asked, refused))


def _asked(
    target: HuggingFaceModel,
    prompts: object,
    seed: int,
    per_prompt: Mapping[Any, Mapping[str, Any]],
) -> Iterator[Asked]:
    """Give every prompt its own options and its seed."""
    named = prompts_by_name(prompts)
    if not isinstance(per_prompt, Mapping) or not all(isinstance(own, Mapping) for own in per_prompt.values()):
        raise InvalidParameter("per_prompt must hold options by name for prompts by name, such as {0: {'seed': 1}}.")
    strange = [name for name in per_prompt if name not in named]
    if strange:
        raise InvalidParameter(f"per_prompt has options for {strange[0]!r}, but there is no such prompt.")
    for place, (name, tokens) in enumerate(named.items()):
        own = dict(per_prompt.get(name, {}))
        its_seed = own.pop("seed", None)
        if its_seed is None:
            its_seed = Noise.of_row(_checked_seed(seed), _number(name, place)).generators[0].initial_seed()
        yield Asked(name, _ids(name, tokens, target), _checked_seed(its_seed, 2**63), own)


def _ids(name: Any, tokens: object, target: HuggingFaceModel) -> Int[Tensor, " _"]:
    """Return a prompt's token ids as a tensor.

    Raises:
        InvalidParameter: they are something else.
    """
    try:
        ids = torch.as_tensor(one_row(tokens), device=target.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameter(f"Prompt {name!r} must be token ids, but is of type {type(tokens).__name__}.") from error
    if ids.dim() != 1:
        raise InvalidParameter(f"Prompt {name!r} must be one row of token ids, but has shape {tuple(ids.shape)}.")
    return ids if len(ids) else ids.long()


def _number(name: Hashable, place: int) -> int:
    """Return the number that a prompt's random numbers follow: its name, or a digest of it; else its place."""
    if isinstance(name, int):
        return name % 256**NAMES_BYTES
    if isinstance(name, str):
        return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAMES_BYTES).digest())
    return place


def _checked_seed(seed: object, below: int = LARGEST_SEED) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < below:
        raise InvalidParameter(f"seed must be an integer >= 0 and below 2^{below.bit_length() - 1}, but is {seed!r}.")
    return seed


def _checked(target: HuggingFaceModel, asked: Asked) -> Asked | Completed:
    """Return the prompt, or why it cannot be continued."""
    count, reason = len(asked.tokens), ""
    if not count:
        reason = "The prompt is empty: give at least one token."
    elif count >= target.context:
        reason = f"The prompt has {count} tokens, but at most {target.context} fit, one of them new."
    else:
        reason = _strange(asked.tokens, target.vocab_size)
    return Completed(asked.name, finish="refused", error=reason, seed=asked.seed) if reason else asked


def _strange(tokens: Int[Tensor, " _"], vocab_size: int) -> str:
    """Return what is wrong with token ids, or nothing."""
    try:
        check_prompts(tokens.unsqueeze(0), vocab_size)
    except InvalidParameter as error:
        return str(error)
    return ""


def _longest(target: HuggingFaceModel, asked: Sequence[Asked], options: Mapping[str, Any]) -> int:
    """Return the length of the longest text: among prompts with the same options, that of the longest prompt."""
    groups: dict[str, Asked] = {}
    for one in asked:
        key = repr(sorted(one.own.items()))
        if key not in groups or len(groups[key].tokens) < len(one.tokens):
            groups[key] = one
    return max((_limit(target, one, options) for one in groups.values()), default=1)


def _limit(target: HuggingFaceModel, asked: Asked, options: Mapping[str, Any]) -> int:
    try:
        return _request(target, asked, options).limits.max_length
    except ContextOverflow:  # a prompt that will be refused; the others end at max_length
        return min({**options, **asked.own}["max_length"], target.context)


def _models_of(drafter: Drafter) -> list[HuggingFaceModel]:
    """Return the models whose caches a drafter keeps."""
    members = [drafter.model] if isinstance(drafter, ModelDrafter) else []
    if isinstance(drafter, EnsembleDrafter):
        members = [*{id(model): model for model, _ in drafter.members}.values()]
    return [one for one in members if isinstance(one, HuggingFaceModel)]


def _request(target: HuggingFaceModel, asked: Asked, common: Mapping[str, Any]) -> Request:
    """Prepare a prompt as Hugging Face's `generate` does.

    Raises:
        ContextOverflow: the prompt is longer than the options allow.
        InvalidParameter: an option that is refused, unknown or outside its range, or a processor that cannot be run.
    """

    def take(_: nn.Module, input_ids: Int[Tensor, "b t"], **given: Any) -> Request:
        criteria, config = given["stopping_criteria"], given["generation_config"]
        prepared = take_apart(input_ids, given["logits_processor"], criteria, None, config, target.vocab_size)
        serial = [one.name for one in prepared.processors[0] if isinstance(one, Serial)]
        if serial:
            raise InvalidParameter(
                f"{serial[0]} keeps state between calls and cannot be copied, so it cannot run beside other texts; "
                "call polydraft.generate for each, or give its class a method fork()."
            )
        (law,), (limits,) = row_laws(prepared), row_limits(prepared, target.context)
        limits = replace(limits, criteria=tuple(map(copied_criterion, limits.criteria)))
        return Request(asked.name, asked.tokens, law, limits, Noise.from_seed(asked.seed, 1))

    options = {**common, **asked.own}
    length, most = len(asked.tokens), options.get("max_length")
    if most is not None and options.get("max_new_tokens") is None and length >= most:
        raise ContextOverflow(f"The prompt has {length} tokens, but at most {most} fit, one of them new.")
    return prepare_by_hugging_face(target.model, asked.tokens.unsqueeze(0), take, options, OF_ONE_CALL)
