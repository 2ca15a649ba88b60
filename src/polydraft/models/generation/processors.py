"""Logits processors at the nodes of a tree: which of them keep state between calls, and how these are run.

Hugging Face calls every processor once per new token, in the order of the text. On a tree a processor is called for
many nodes, most of which never become text. That is the same for a processor whose answer depends on its arguments
alone. One that keeps state must see each path as if it were the text: it is copied wherever paths part, so that the
copy at a node has seen this node's own path, and the copy at the last accepted node goes on. What cannot be copied is
called once per committed token, and the text is decoded without drafts.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from polydraft.errors import InvalidParameter
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.generation.processor_trial import Behaviour, behaviour, failure
from polydraft.models.grammar.masks import GrammarLogitsProcessor
from polydraft.models.sources import row_of

OWN_OF_XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"


class ReplayedGuide:
    """A guide of outlines-core that knows the tokens it took: a new one that takes them again is its copy.

    Copying a guide itself writes the whole index into a pickle and back.

    Args:
        guide: one that took nothing yet, or exactly these tokens.
        tokens: what it took.
    """

    def __init__(self, guide: Any, tokens: Sequence[int] = ()) -> None:
        self.guide, self.tokens = guide, [*tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guide, name)

    def advance(self, token_id: int, return_tokens: bool = True) -> Any:
        """Take a token."""
        found = self.guide.advance(token_id=token_id, return_tokens=return_tokens)
        self.tokens.append(token_id)
        return found

    def fork(self, index: Any) -> "ReplayedGuide":
        """Return a guide in the same state that goes its own way."""
        twin = type(self.guide)(index)
        for token in self.tokens:
            twin.advance(token_id=token, return_tokens=False)
        return ReplayedGuide(twin, self.tokens)


def _full_name(processor: object) -> str:
    kind = type(processor)
    return f"{kind.__module__}.{kind.__qualname__}"


def _fork_xgrammar(processor: Any) -> Any:
    """Share the compiled grammars, which do not change, and fork the matchers, which do."""
    twin = copy.copy(processor)
    twin.matchers = [one.fork() for one in processor.matchers]
    twin.token_bitmask = None if processor.token_bitmask is None else processor.token_bitmask.clone()
    return twin


def _fork_outlines(matchers: str, masks: str, bias: str, forked: Callable[[Any, Any], Any], processor: Any) -> Any:
    """Fork what a processor of outlines makes at its first call: its matchers, its masks, and a method of its own."""
    twin = copy.copy(processor)
    if not processor.is_first_token:
        setattr(twin, matchers, [forked(processor, one) for one in getattr(processor, matchers)])
        held = getattr(processor, masks)
        setattr(twin, masks, held.clone() if isinstance(held, Tensor) else copy.deepcopy(held))
        setattr(twin, bias, MethodType(getattr(processor, bias).__func__, twin))
    return twin


def _fork_guide(processor: Any, guide: Any) -> Any:
    if isinstance(guide, ReplayedGuide):
        return guide.fork(processor.index)
    begun = guide.get_state() != processor.index.get_initial_state()
    return copy.copy(guide) if begun else ReplayedGuide(type(guide)(processor.index))


_FORKS: dict[str, Callable[[Any], Any]] = {
    OWN_OF_XGRAMMAR: _fork_xgrammar,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": partial(
        _fork_outlines, "_guides", "_bitmasks", "bias_logits", _fork_guide
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": partial(
        _fork_outlines, "ll_matchers", "bitmask", "_bias_logits", lambda _, matcher: matcher.deep_copy()
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": partial(
        _fork_outlines, "_matchers", "_bitmask", "_bias_logits", lambda _, matcher: matcher.fork()
    ),
}


Call = Callable[..., Tensor]
"""A processor: Hugging Face annotates its arguments with legacy tensor classes that no tensor is an instance of."""

BUILT_IN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The kinds of errors by which code fails that is wrong, or wrongly called."""
STATELESS = frozenset(
    """
    MinLength MinNewTokensLength Temperature RepetitionPenalty EncoderRepetitionPenalty TopP TopK TopH MinP Typical
    Epsilon Eta NoRepeatNGram EncoderNoRepeatNGram SequenceBias NoBadWords ForcedBOSToken ForcedEOSToken InfNanRemove
    ExponentialDecayLengthPenalty LogitNormalization SuppressTokensAtBegin SuppressTokens BarkEosPrioritizer Watermark
    WhisperTimeStamp
    """.split()
)
"""Hugging Face's processors whose answer depends on the row alone, without the endings of their names."""
STATEFUL = frozenset(("UnbatchedClassifierFreeGuidance", "SynthIDTextWatermark"))
"""Those that keep state, which can be copied."""
UNSUITED = frozenset(
    "ClassifierFreeGuidance AlternatingCodebooks WhisperNoSpeechDetection DiaClassifierFreeGuidance "
    "DiaEOSChannelFilter DiaEOSDelayPattern".split()
)
"""Those for models of speech and music, or that mix the rows of a batch."""


@runtime_checkable
class RowProcessor(Protocol):
    """A processor of one row of the batch."""

    @property
    def name(self) -> str:
        """The class of the processor, for statistics."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether its answer depends on earlier calls; it is then called for one node at a time, by a fork."""
        ...

    def fork(self, memo: dict[int, Any]) -> "RowProcessor":
        """Return a processor in the same state that goes its own way; what the memo has was copied already."""
        ...

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the changed scores."""
        ...


@dataclass(frozen=True, eq=False)
class Stateless:
    """A processor whose answer depends on its arguments alone."""

    call: Call
    name: str
    keeps_state = False

    def fork(self, memo: dict[int, Any]) -> "Stateless":
        """Return the processor itself."""
        return self

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the changed scores."""
        return answered(self.call, history, scores, self.name)


@dataclass(frozen=True, eq=False)
class Forked:
    """A processor that keeps state and can be copied."""

    call: Call
    name: str
    keeps_state = True

    def fork(self, memo: dict[int, Any]) -> "Forked":
        """Return a copy in the same state; what it shares with other processors it shares with their copies."""
        return Forked(forked(self.call, memo), self.name)

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the changed scores, and take note of the call."""
        return answered(self.call, history, scores, self.name)


class Serial:
    """A processor that keeps state and cannot be copied: it is called once for every committed token.

    Asked again for the text that it was asked for last, as by a step that was interrupted, it repeats its answer.
    """

    keeps_state = False
    serial = True

    def __init__(self, call: Call, name: str) -> None:
        self.call = call
        self.name = name
        self._last: tuple[Tensor, Tensor] | None = None

    def fork(self, memo: dict[int, Any]) -> "Serial":
        """Return the processor itself; whoever uses it has no branches."""
        return self

    def __call__(self, history: Int[Tensor, "1 t"], scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        """Return the changed scores."""
        if self._last is None or not torch.equal(self._last[0], history):
            self._last = history, answered(self.call, history, scores, self.name).clone()
        return self._last[1].clone()


def row_processors(
    processors: Sequence[Call], rows: int, prompts: Int[Tensor, "b t"], vocab_size: int
) -> tuple[tuple[RowProcessor, ...], ...]:
    """Return the processors of each row, each of its own if they keep state.

    A class of Hugging Face's is known. Another may say what it is: `stateless = True`, or a method `fork()` that
    returns an independent copy. What says nothing is tried on the prompt (`behaviour`), by copies where possible.

    Args:
        processors: as Hugging Face hands them over, for the batch.
        rows: the rows of the batch; `prompts` are these rows as the user gave them.
        vocab_size: the number of scores.

    Raises:
        InvalidParameter: a processor is none, mixes the rows of a batch, or keeps state that cannot be copied while
            there are several rows.
    """
    kinds = [kind_of(_of_row(one, 0, rows), prompts[:1], vocab_size, rows) for one in processors]
    for one, kind in zip(processors, kinds, strict=True):
        if kind is Serial and rows > 1:
            _check_trial(_of_row(one, 0, rows), prompts[:1], vocab_size)
            raise InvalidParameter(
                f"{name_of(one)} keeps state between calls and cannot be copied, so that it serves one row, but there "
                f"are {rows}; generate row by row with a new one each, or give its class a method fork()."
            )
    pairs = list(zip(processors, kinds, strict=True))
    built = [[kind(_of_row(one, row, rows), name_of(one)) for one, kind in pairs] for row in range(rows)]
    return tuple(map(fork_all, built))  # copies, so that the user's own stay as they are


def kind_of(
    processor: Call, prompt: Int[Tensor, "1 t"], vocab_size: int, rows: int = 1
) -> Callable[[Call, str], RowProcessor]:
    """Return how a processor is to be run: `Stateless`, `Forked` or `Serial`.

    Raises:
        InvalidParameter: it cannot be called, or not for one row of several.
    """
    if not callable(processor):
        raise InvalidParameter(
            f"A logits processor is called with token ids and scores, but one is of type {type(processor).__name__}."
        )
    kind = type(processor)
    stem = kind.__name__.removesuffix("LogitsProcessor").removesuffix("LogitsWarper")
    known = stem if kind.__module__ == logits_process.__name__ else ""
    if known in UNSUITED:
        raise InvalidParameter(f"{name_of(processor)} is refused: it is not for single rows of text tokens.")
    if known in STATELESS or getattr(processor, "stateless", False) is True:
        return Stateless
    if known in STATEFUL or _own_fork(processor) is not None:
        return Forked
    found = behaviour(processor, forked, prompt, vocab_size)
    if found is Behaviour.mixing and rows > 1:
        raise InvalidParameter(
            f"{name_of(processor)} answers for a row by its number or by the rows beside it, but each of the {rows} "
            "rows is decoded by itself; generate row by row."
        )
    return {Behaviour.stateless: Stateless, Behaviour.serial: Serial}.get(found, Forked)


def _check_trial(processor: Call, prompt: Int[Tensor, "1 t"], vocab_size: int) -> None:
    name = name_of(processor)

    def asked(one: Call) -> Call:
        twin = forked(one)
        return twin if twin is one else partial(answered, twin, name=name)

    error = failure(processor, asked, prompt, vocab_size)
    if isinstance(error, InvalidParameter):
        raise error
    if error is not None:
        raise InvalidParameter(f"The logits processor {name} failed: {first_sentence(error)}.") from error


def name_of(processor: object) -> str:
    """Return what a processor is called: its class, or the name of the function that it is."""
    return getattr(processor, "__name__", None) or type(processor).__name__


def fork_all(processors: Sequence[RowProcessor]) -> tuple[RowProcessor, ...]:
    """Return copies of a row's processors; objects that they share are shared by the copies."""
    memo = dict[int, Any]()
    return tuple(one.fork(memo) for one in processors)


def forked(processor: Call, memo: dict[int, Any] | None = None) -> Call:
    """Return an independent copy in the same state; models and tokenizers that it refers to are shared.

    Args:
        processor: what is copied.
        memo: what was copied already, as for `copy.deepcopy`; it is added to.

    Raises:
        Exception: whatever the processor's own `fork`, or copying it, raises.
    """
    own = _own_fork(processor)
    if own is not None:
        return cast(Call, own())
    if isinstance(processor, FunctionType):
        return _with_cells_of_its_own(processor)
    fields: dict[str, Any] = getattr(processor, "__dict__", None) or {}
    held = [one for one in fields.values() if isinstance(one, nn.Module | PreTrainedTokenizerBase)]
    memo = {} if memo is None else memo
    memo.update({id(one): one for one in held})
    return copy.deepcopy(processor, memo)


def answered(call: Call, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"], name: str) -> Float[Tensor, "n V"]:
    """Return what a processor answers, in the precision of the scores.

    Raises:
        InvalidParameter: it answers something else than changed scores, or fails by an error of Python's own kinds;
            others, by which a user may end a generation, pass through.
    """
    try:
        changed: object = call(history, scores)
    except BUILT_IN as error:
        raise InvalidParameter(f"The logits processor {name} failed: {first_sentence(error)}.") from error
    if not isinstance(changed, Tensor) or changed.shape != scores.shape or changed.is_complex():
        what = type(changed).__name__
        if isinstance(changed, Tensor):
            what = f"scores of shape {tuple(changed.shape)}" + " of complex numbers" * changed.is_complex()
        raise InvalidParameter(
            f"The logits processor {name} must return scores of shape {tuple(scores.shape)}, but returned {what}."
        )
    return changed.to(scores)


def warn_of_serial(processors: Sequence[RowProcessor]) -> str:
    """Say if there is a processor that allows no drafts; return the sentence, or nothing."""
    serial = [one.name for one in processors if isinstance(one, Serial)]
    if not serial:
        return ""
    reason = f"{serial[0]} keeps state between calls and cannot be copied, so the text is decoded without drafts"
    warnings.warn(
        f"{reason}; give its class a method fork(), or stateless = True if its answer depends on its arguments alone.",
        RuntimeWarning,
        stacklevel=7,  # the caller of `generate`
    )
    return reason


def _own_fork(processor: object) -> Callable[[], Any] | None:
    """Return the method by which a processor forks itself, or what forks its library's processors; None for others."""
    own = getattr(processor, "fork", None)
    if callable(own):
        return own
    known = _FORKS.get(_full_name(processor))
    return None if known is None else partial(known, processor)


def _with_cells_of_its_own(function: FunctionType) -> Call:
    """Return a function with copies of the variables that it closes over; copy.deepcopy would share them."""
    cells = tuple(CellType(copy.deepcopy(cell.cell_contents)) for cell in function.__closure__ or ())
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _of_row(processor: Call, row: int, rows: int) -> Call:
    """Return a processor that can be called for one row of the batch alone."""
    if isinstance(processor, GrammarLogitsProcessor):
        return processor.rows[row]
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
        return _with(processor, prompt_ignore_length=int(processor.prompt_ignore_length[row]))
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = partial(_for_row, processor._prefix_allowed_tokens_fn, row)
        return _with(processor, _prefix_allowed_tokens_fn=allowed, _num_beams=1)
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        return _with(processor, encoder_input_ids=row_of(processor.encoder_input_ids, row, rows))
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        place = row * processor.batch_size // rows
        return _with(processor, generated_ngrams=processor.generated_ngrams[place : place + 1], batch_size=1)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        context = processor.unconditional_context
        given = {name: context[name] for name in ("input_ids", "attention_mask") if context[name] is not None}
        own = {name: row_of(value, row, rows) for name, value in given.items()}
        return _with(processor, unconditional_context=context | own)
    if _full_name(processor) == OWN_OF_XGRAMMAR and len(cast(Any, processor).compiled_grammars) > 1:
        return _with(processor, compiled_grammars=[cast(Any, processor).compiled_grammars[row]])
    return processor


def _with(processor: Call, **fields: Any) -> Call:
    own = copy.copy(processor)
    vars(own).update(fields)
    return own


def _for_row(allowed: Callable[[int, Tensor], list[int]], row: int, _: int, text: Tensor) -> list[int]:
    return allowed(row, text)
