"""The masks of a grammar: a logits processor whose answer depends on the text alone, and where a text ends by it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar
from polydraft.models.grammar.matcher_walk import State, Walk
from polydraft.models.grammar.vocabulary import Vocabulary, fitting_tokenizer, vocabulary_of

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
        states = [one for one in found if one is not None and self.says_something(one)]
        if not states:
            return scores
        forbidden = torch.from_numpy(self._forbidden(states, scores.shape[-1])).to(scores.device)
        if len(states) == len(found):
            return self._masked(scores, forbidden)
        kept = [place for place, one in enumerate(found) if one is not None and self.says_something(one)]
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


def grammar_processor(options: Mapping[str, Any], model: PreTrainedModel) -> GrammarLogitsProcessor | None:
    """Return the processor of a call's grammar; None if it has none.

    Args:
        options: the call's arguments; of these `grammar` and `tokenizer`.
        model: the target.

    Raises:
        InvalidParameter: it is no grammar, allows nothing, or there is no tokenizer for it.
        MissingExtra: llguidance is not installed.
        VocabularyMismatch: the tokenizer is another model's.
    """
    grammar = options.get("grammar")
    if grammar is None:
        return None
    if not isinstance(grammar, Grammar):
        raise InvalidParameter(
            f"grammar must be a Grammar such as Grammar.regex('[0-9]+') or Grammar.json_object(), but is "
            f"{shown(grammar)}."
        )
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    tokenizer = fitting_tokenizer(options.get("tokenizer"), model, size)
    vocabulary = vocabulary_of(tokenizer, size)
    return GrammarLogitsProcessor(vocabulary.start(grammar), vocabulary)
