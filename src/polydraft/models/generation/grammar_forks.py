"""Processors of grammar libraries that cannot be copied as they are, but whose parts can: how to fork them.

They are known by the names of their classes, so that nothing of these libraries is imported.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor

OWN_OF_XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"


def fork_of_library(processor: object) -> Callable[[], Any] | None:
    """Return what forks a processor of a known library; None for others."""
    fork = _FORKS.get(_name(processor))
    return None if fork is None else lambda: fork(processor)


def of_row_of_library(processor: Any, row: int) -> Any:
    """Return a known library's processor with the grammar of one row of the batch; others as they are."""
    if _name(processor) != OWN_OF_XGRAMMAR or len(processor.compiled_grammars) == 1:
        return processor
    own = copy.copy(processor)
    own.compiled_grammars = [processor.compiled_grammars[row]]
    return own


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


def _name(processor: object) -> str:
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


def _fork_matcher(processor: Any, matcher: Any) -> Any:
    return matcher.fork()


def _copy_matcher(processor: Any, matcher: Any) -> Any:
    return matcher.deep_copy()


_FORKS: dict[str, Callable[[Any], Any]] = {
    OWN_OF_XGRAMMAR: _fork_xgrammar,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": partial(
        _fork_outlines, "_guides", "_bitmasks", "bias_logits", _fork_guide
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": partial(
        _fork_outlines, "ll_matchers", "bitmask", "_bias_logits", _copy_matcher
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": partial(
        _fork_outlines, "_matchers", "_bitmask", "_bias_logits", _fork_matcher
    ),
}
