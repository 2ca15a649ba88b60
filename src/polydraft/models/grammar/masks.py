"""The masks of a grammar: what a processor lets through at the nodes of a tree, and where a text ends."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar, Vocabulary, fitting_tokenizer, vocabulary_of
from polydraft.models.grammar.late import LateGrammar
from polydraft.models.grammar.late_walk import LateWalk
from polydraft.models.grammar.walk import AnyWalk, State, Walk

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

    def __init__(self, walk: AnyWalk, begin: int, eos: Sequence[int], named: Sequence[bool]) -> None:
        self.walk, self.begin = walk, begin
        self.eos, self.named = np.array(eos, np.int64), np.array(named, np.bool_)

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the masked scores."""
        found = [None if path is None else self.walk.state(path) for path in self.paths(history)]
        kept = [place for place, one in enumerate(found) if one and not one.free and self.says_something(one)]
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

    def forced(self, path: bytes, most: int) -> list[int]:
        """Return the tokens that follow a path one after another, each of them the only one that is allowed there.

        The last may be an end of text.

        Args:
            path: the grammar's tokens so far, as bytes of int64.
            most: how many are wanted at most.
        """
        found = list[int]()
        while len(found) < most and not (found and found[-1] in self.eos):
            state = self.walk.state(path + np.array(found, np.int64).tobytes())
            token = None if state is None or state.free else self._only(state)
            if token is None:
                break
            found.append(token)
        return found

    def _only(self, state: State) -> int | None:
        """Return the only token that may come next; None if there are several, or none."""
        allowed = 8 * len(state.bits) - int.from_bytes(state.bits.tobytes()).bit_count()
        if not self.says_something(state) or allowed > 1 + len(self.eos):
            return None
        tokens = np.flatnonzero(~self._forbidden([state], 8 * len(state.bits))[0])
        return int(tokens[0]) if len(tokens) == 1 else None

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
        start: the grammar's matcher at the beginning of a text; a grammar that begins later is itself.
        vocabulary: the tokenizer that it was compiled for.
    """

    stateless = True

    def __init__(self, start: Any, vocabulary: Vocabulary) -> None:
        self.start, self.vocabulary = start, vocabulary
        self.rows: tuple[RowMask, ...] = ()

    def _walk(self, eos: Sequence[int]) -> AnyWalk:
        if isinstance(self.start, LateGrammar):
            return LateWalk(self.start, self.vocabulary, eos)
        return Walk(self.start, self.vocabulary.end)

    def placed(self, begins: Sequence[int], eos: frozenset[int]) -> "GrammarLogitsProcessor":
        """Return the grammar for rows whose own text begins there."""
        made, ids, tokens = GrammarLogitsProcessor(self.start, self.vocabulary), sorted(eos), self.vocabulary.tokens
        named = [tokens.is_special_token(one) for one in ids]
        made.rows = tuple(RowMask(self._walk(ids), begin, ids, named) for begin in begins)
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
    if not isinstance(grammar, Grammar | LateGrammar):
        raise InvalidParameter(
            f"grammar must be a Grammar such as Grammar.regex('[0-9]+') or Grammar.json_object(), but is "
            f"{shown(grammar)}."
        )
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    vocabulary = vocabulary_of(fitting_tokenizer(tokenizer, model, size), size)
    if isinstance(grammar, LateGrammar):
        LateWalk(grammar, vocabulary, ()).compile()
        return GrammarLogitsProcessor(grammar, vocabulary)
    return GrammarLogitsProcessor(vocabulary.start(grammar), vocabulary)
