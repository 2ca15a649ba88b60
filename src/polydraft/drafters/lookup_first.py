"""Prompt lookup where the text repeats itself, another drafter elsewhere."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from polydraft.drafters.ngram import chains_found, given_chain
from polydraft.drafters.protocol import Drafter, Session, Text, is_sound, resumed
from polydraft.errors import InvalidParameter
from polydraft.probs import Noise
from polydraft.schemes import Product, Scheme
from polydraft.trees import Draft, TreePolicy, Verdict

LEAST = 2
"""A continuation of one token is not worth a step."""


@dataclass(frozen=True, eq=False)
class LookupState:
    """The other drafter's state, and the target's number of tokens."""

    inner: Any
    vocab_size: int


@dataclass(frozen=True, eq=False)
class LookupFirst:
    """Continues a text as it went on after its last few tokens before; asks another drafter where they are new.

    A chain that is looked up costs no pass of a draft model and is long. Its tokens are fixed, which is to say drawn
    from one-hot rows, so that it is a draft under the other drafter's scheme, and every rule is exact for it. What the
    other drafter misses meanwhile it reads when it is asked again. A batch is looked up only if all its texts repeat
    themselves at once, so that above temperature 0 the text that a seed gives depends on its neighbours, if not in law.

    Args:
        drafter: the other drafter.
        trusted: how many last tokens must have occurred before in the same order.
        most: the longest chain; never more than the policy's trees have nodes.

    Raises:
        InvalidParameter: one of the numbers is below one.

    Source: prompt lookup decoding (`NgramDrafter`); the combination with a draft model is common in servers.
    """

    drafter: Drafter
    trusted: int = 3
    most: int = 12

    def __post_init__(self) -> None:
        if min(self.trusted, self.most) < 1:
            raise InvalidParameter(f"trusted and most must be at least 1, but are {self.trusted} and {self.most}.")

    @property
    def name(self) -> str:
        """The other drafter's name, after what comes first."""
        return f"lookup, else {self.drafter.name}"

    @property
    def reads_hidden(self) -> tuple[int, ...]:
        """What the other drafter reads."""
        return self.drafter.reads_hidden

    @property
    def sound(self) -> bool:
        """Whether the other drafter's drafts are sound; chains that are looked up always are."""
        return is_sound(self.drafter)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` where the other drafter does."""
        self.drafter.check(scheme)

    def start(self, text: Text, session: Session) -> LookupState:
        """Let the other drafter read the prompts."""
        return LookupState(self.drafter.start(text, session), session.vocab_size)

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> LookupState:
        """Let the other drafter read what is new, or go on from a state of its own."""
        inner = state.inner if isinstance(state, LookupState) else state
        return LookupState(resumed(self.drafter, inner, before, text, known, session), session.vocab_size)

    def draft(self, state: LookupState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Look all rows' continuations up, or draft with the other drafter."""
        found = self._found(state, text) if policy.shape.counts else []
        if not found:
            return self.drafter.draft(state.inner, text, scheme, policy, noise)
        draft = given_chain(text, [tokens[: policy.shape.size - 1] for tokens in found])
        return replace(draft, probs=draft.probs.unsqueeze(-2)) if isinstance(scheme, Product) else draft

    def commit(self, state: LookupState, text: Text, verdict: Verdict) -> LookupState:
        """Tell the other drafter what was kept: after a lookup, so many steps without drafts."""
        drafted = verdict.path.shape[-1] > 0
        if not (drafted and self._found(state, text)):
            return replace(state, inner=self.drafter.commit(state.inner, text, verdict))
        inner, none = state.inner, replace(verdict, path=verdict.path[:, :0], length=torch.zeros_like(verdict.length))
        for _ in range(1 + int(verdict.length.max())):
            inner = self.drafter.commit(inner, text, none)
        return replace(state, inner=inner)

    def join(self, state: LookupState, row: int, other: LookupState) -> LookupState:
        """Let the other drafter take over the newcomer."""
        return replace(state, inner=self.drafter.join(state.inner, row, other.inner))

    def _found(self, state: LookupState, text: Text) -> list[Any]:
        """Return every row's continuation; nothing if one is too short."""
        found = chains_found(text, self.trusted, self.trusted, self.most, state.vocab_size)
        return found if all(len(tokens) >= LEAST for tokens in found) else []
