"""The masks of a grammar: its states along the paths of a tree, what a processor lets through, where a text ends."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar, Vocabulary, cleaned, fitting_tokenizer, is_dead_end, vocabulary_of

FIRST_BLOCK, SIZE = 8, 8
"""The tokens that are looked at first, from the end, to see where paths part; and the bytes of a token."""


@dataclass(frozen=True, eq=False)
class State:
    """Where a grammar is after a path.

    Args:
        bits: a bit for each token, whether it may not come next; llguidance's end may not.
        ends: whether the text may end here.
        goes_on: whether any token may come next.
    """

    bits: np.ndarray
    ends: bool
    goes_on: bool


class Walk:
    """Answer where a grammar is after any path of tokens.

    The answers depend on the path alone. The matcher takes back what the last path had more and takes what the next
    one has more, which costs a microsecond a token however long the text is; a copy of a matcher costs as much as the
    text is long. It never takes a token that the grammar forbids, after which it could not go back.

    Args:
        start: a matcher at the beginning, which stays as it is.
        end: the id of llguidance's end.
    """

    def __init__(self, start: Any, end: int) -> None:
        self.failure = ""
        self._start, self._end = start, end
        self._matcher: Any = None
        self._at = b""
        self._last: tuple[bytes, State] | None = None

    def state(self, path: bytes) -> State | None:
        """Return where the grammar is after a path, the bytes of its tokens as int64; None outside of it.

        Where llguidance gives up, a path counts as outside, and `failure` says why.
        """
        last = self._last
        if last is not None and last[0] == path:
            return last[1]
        self.failure = ""
        matcher = self._led(path)
        found = None if matcher is None else self._found(matcher)
        if found is not None:
            self._last = path, found
        return found

    def _led(self, path: bytes) -> Any:
        """Lead the matcher along a path; None if it does not get there."""
        matcher, at = self._matcher, self._at
        self._matcher = None  # whoever is interrupted below begins anew
        common = 0 if matcher is None else common_start(at, path)
        back = len(at) // SIZE - common
        if matcher is None or (back and not matcher.rollback(back)):
            matcher, common = self._start.deep_copy(), 0
        more = np.frombuffer(path[SIZE * common :], np.int64).tolist()
        taken = 0 if self._end in more else matcher.try_consume_tokens(more)
        if matcher.is_error():
            self.failure = cleaned(matcher.get_error())
            return None
        self._matcher, self._at = matcher, path[: SIZE * (common + taken)]
        return matcher if taken == len(more) else None

    def _found(self, matcher: Any) -> State | None:
        ends = bool(matcher.is_accepting())
        bits = ~np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            self._matcher = None
            if not is_dead_end(matcher):
                self.failure = cleaned(matcher.get_error())
                return None
            bits[:] = 0xFF
        bits[self._end >> 3] |= 1 << (self._end & 7)
        return State(bits, ends, bits.tobytes().count(0xFF) < len(bits))


def common_start(one: bytes, other: bytes) -> int:
    """Return how many tokens two paths begin with in common; they mostly part near their ends."""
    most, block = min(len(one), len(other)), SIZE * FIRST_BLOCK
    if one[:most] == other[:most]:
        return most // SIZE
    while block < most and one[: most - block] != other[: most - block]:
        block *= 2
    place = max(most - block, 0)
    while one[place : place + SIZE] == other[place : place + SIZE]:
        place += SIZE
    return place // SIZE


RULED_OUT = torch.finfo(torch.float32).min / 2
"""Scores below this are those of tokens that have no chance."""


class RowMask:
    """Rule out, after every history, the tokens by which the text would leave the grammar.

    Rule: with y the tokens behind the prompt, a token keeps its score if some text of the grammar begins with y and it;
    an end of text keeps its score where y is a text of the grammar, or where the rules name it. All others get -inf.
    Where other processors have left no token of these, the text ends: an end of text is all that is left, or, for a
    model without one, any token of the grammar's. A history outside the grammar keeps its scores: it never becomes
    text.

    Args:
        walk: the grammar's states.
        begin: how many tokens of a history are not the grammar's: the prompt, its padding, and a forced first token.
        eos: end-of-text ids.
        named: which of these are special tokens, which rules may name.
    """

    stateless = True

    def __init__(self, walk: Walk, begin: int, eos: Sequence[int], named: Sequence[bool]) -> None:
        self.walk, self.begin = walk, begin
        self.eos, self.named = np.array(eos, np.int64), np.array(named, np.bool_)

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the masked scores."""
        found = [None if path is None else self.walk.state(path) for path in self.paths(history)]
        kept = [place for place, one in enumerate(found) if one is not None and self.says_something(one)]
        if not kept:
            return scores
        states = [cast(State, found[place]) for place in kept]
        forbidden = torch.from_numpy(self._forbidden(states, scores.shape[-1])).to(scores.device)
        if len(states) == len(found):
            return self._masked(scores, forbidden)
        scores = scores.clone()
        scores[kept] = self._masked(scores[kept], forbidden)
        return scores

    def paths(self, history: Int[Tensor, "n t"]) -> list[bytes | None]:
        """Return the tokens of each history that are the grammar's, as bytes; None where it has not begun."""
        if history.shape[1] < self.begin:
            return [None] * len(history)
        new: np.ndarray = history[:, self.begin :].to("cpu", torch.int64).numpy()
        return [row.tobytes() for row in new]

    def says_something(self, state: State) -> bool:
        """Tell whether a state leaves anything: a model without an end of text has none behind a complete text."""
        return state.goes_on or (state.ends and len(self.eos) > 0)

    def _forbidden(self, states: Sequence[State], size: int) -> np.ndarray:
        """Return which tokens may not come next, "n V"."""
        packed = np.stack([one.bits for one in states])
        found = np.unpackbits(packed, axis=-1, count=size, bitorder="little").view(np.bool_)
        if len(self.eos):
            ends = np.array([[one.ends] for one in states])
            found[:, self.eos] = ~ends & (found[:, self.eos] | ~self.named)
        return found

    def _masked(self, scores: Float[Tensor, "n V"], forbidden: Bool[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Mask scores; where nothing is left, leave an end of text, or what the grammar allows."""
        masked = scores.masked_fill(forbidden, -torch.inf)
        best = masked.amax(dim=-1)
        if not float(best.min()) <= RULED_OUT:
            return masked
        if len(self.eos):
            forbidden = torch.ones_like(forbidden)
            forbidden[:, torch.from_numpy(self.eos).to(forbidden.device)] = False
        ending = torch.zeros_like(masked).masked_fill(forbidden, -torch.inf)
        return torch.where((best <= RULED_OUT).unsqueeze(-1), ending, masked)


class RowEnd:
    """End a text where its grammar leaves no token, and no end-of-text id can say so.

    That is a complete text of a model without such an id; and, with a warning, a text that the tokenizer's tokens
    cannot complete, or at which llguidance gives up.

    Args:
        mask: the row's mask.
    """

    stateless = True

    def __init__(self, mask: RowMask) -> None:
        self.mask = mask

    def __call__(self, history: Int[Tensor, "1 t"], scores: object) -> bool:
        """Tell whether the text ends with its last token."""
        (path,) = self.mask.paths(history)
        if path is None:
            return False
        state = self.mask.walk.state(path)
        if state is not None and self.mask.says_something(state):
            return False
        if state is None or not state.ends:
            why = "no token goes on from here" if state is not None else self.mask.walk.failure or "it has left it"
            warnings.warn(f"A text ends before its grammar is complete: {why}.", RuntimeWarning, stacklevel=2)
        return True


class GrammarLogitsProcessor(LogitsProcessor):
    """A grammar among the processors of a call, which Hugging Face puts behind the user's and before the filters.

    Args:
        start: the grammar's matcher at the beginning of a text.
        vocabulary: the tokenizer that it was compiled for.
    """

    stateless = True

    def __init__(self, start: Any, vocabulary: Vocabulary) -> None:
        self.start, self.vocabulary = start, vocabulary
        self.rows: tuple[RowMask, ...] = ()

    def placed(self, begins: Sequence[int], eos: frozenset[int]) -> "GrammarLogitsProcessor":
        """Return the grammar for rows whose own text begins there."""
        made, ids, tokens = GrammarLogitsProcessor(self.start, self.vocabulary), sorted(eos), self.vocabulary.tokens
        named = [tokens.is_special_token(one) for one in ids]
        end = self.vocabulary.end
        made.rows = tuple(RowMask(Walk(self.start, end), begin, ids, named) for begin in begins)
        return made

    @property
    def endings(self) -> tuple[RowEnd, ...]:
        """The criteria by which the rows end."""
        return tuple(map(RowEnd, self.rows))


def grammar_processor(grammar: object, tokenizer: object, model: PreTrainedModel) -> GrammarLogitsProcessor:
    """Return the processor of a call's grammar.

    Args:
        grammar: what was given as such.
        tokenizer: the call's; None for the target's own.
        model: the target.

    Raises:
        InvalidParameter: it is no grammar, allows nothing, or there is no tokenizer for it.
        MissingExtra: llguidance is not installed.
        VocabularyMismatch: the tokenizer is another model's.
    """
    if not isinstance(grammar, Grammar):
        raise InvalidParameter(
            f"grammar must be a Grammar such as Grammar.regex('[0-9]+') or Grammar.json_object(), but is "
            f"{shown(grammar)}."
        )
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    vocabulary = vocabulary_of(fitting_tokenizer(tokenizer, model, size), size)
    return GrammarLogitsProcessor(vocabulary.start(grammar), vocabulary)
