"""Drafters one behind the other: the first tokens of a chain from the better one, the next from a cheaper one."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from polydraft.drafters.contract import (
    Defaults,
    Drafter,
    DraftRequest,
    Needs,
    Session,
    finished,
    is_by_text_alone,
    is_sound,
    stretches,
)
from polydraft.drafters.several.route import SeveralDrafters
from polydraft.drafters.text.guess import Bounds, TextDrafter, given
from polydraft.errors import InvalidDraft, InvalidParameter, UnpairedScheme, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import cut, parts, scratch, shared
from polydraft.schemes import IID, Scheme, TopK
from polydraft.trees import MENDABLE, Chain, Draft, extended


@dataclass(frozen=True, eq=False)
class ByDepthState:
    """The states of the members, the target's number of tokens, and what the first one drafted in the step at hand.

    Args:
        members: the members'.
        vocab_size: the target's number of tokens.
        first: per row, how many drafts were the first member's.
    """

    members: tuple[Any, ...] = parts()
    vocab_size: int = shared()
    first: tuple[int, ...] = scratch(())


@dataclass(frozen=True, eq=False)
class ByDepthDrafter(Drafter):
    """Drafts chains of which each member writes a stretch: the first one its `lengths[0]` tokens, then the next one.

    A draft at depth i counts only where the i - 1 above it are kept, so that a dearer drafter pays at the top, and
    further down a cheaper one. A later member reads what was drafted above as if it were text; behind the verdict it
    forgets what was not kept. Where a member drafts less than its share, the next one goes on from there.

    Exactness: each node keeps the row that its child was drawn from, which is fixed by the text and the nodes above. A
    text drafter's tokens are fixed, which is to say drawn from one-hot rows. Who drafts at a node follows from its
    depth and from what could be drafted above it, and is known before its child is drawn.

    If a later member fails, the chain above is verified, with what it drew before.

    Only the first member and text drafters are told what became of a step. Another member learns nothing from steps.

    Args:
        members: the drafters, from the top down.
        lengths: tokens of each; a chain has so many in all, or as many as the policy's trees are deep.

    Raises:
        InvalidParameter: one is no drafter, drafts rows apart or brings riders, a later one reads the target's hidden
            states or keys, which are there of committed text alone, or lengths are not one whole number of at least 1
            for each.

    Source: horizontal cascades, arXiv 2312.11462.
    """

    members: tuple[Drafter, ...]
    lengths: tuple[int, ...]
    name: str = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        members: object = self.members
        if not isinstance(members, tuple) or not members or not all(isinstance(one, Drafter) for one in self.members):
            raise InvalidParameter(f"members must be a tuple of drafters, but are {shown(members)}.")
        lengths: object = self.lengths
        told = isinstance(lengths, tuple) and len(lengths) == len(self.members)
        if not told or not all(is_whole(one) and one >= 1 for one in self.lengths):
            raise InvalidParameter(
                f"lengths must be a whole number of at least 1 for each of {len(self.members)} members, but are "
                f"{shown(lengths)}."
            )
        for place, one in enumerate(self.members):
            _check_member(one, later=place > 0)
        object.__setattr__(self, "name", f"by-depth ({' then '.join(one.name for one in self.members)})")
        object.__setattr__(self, "needs", replace(self.members[0].needs, passes=None))

    @property
    def sound(self) -> bool:
        """Whether all members are."""
        return all(map(is_sound, self.members))

    def stretches(self, length: int) -> list[tuple[Drafter, int]]:
        """Return those of the members.

        Raises:
            InvalidParameter: what follows from the text alone stands above another, which goes on where it ends.
        """
        if any(map(is_by_text_alone, self.members[:-1])):
            raise InvalidParameter("A text drafter above another leaves it as much as it does not find; name it last.")
        found, left = list[tuple[Drafter, int]](), length
        for member, share in zip(self.members, self.lengths, strict=True):
            found += stretches(member, min(share, left)) if left else []
            left -= min(share, left)
        return found

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give the whole chain: of the likeliest tokens at temperature 0, where all members can draft these."""
        scheme: Scheme = IID()
        if params.temperature == 0:
            with suppress(UnpairedScheme):
                self.check(TopK())
                scheme = TopK()
        return Defaults(scheme, Chain(sum(self.lengths)))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` where a member does, and if drafts share their noise or have several rows."""
        if not scheme.independent or scheme.several_rows:
            raise UnpairedScheme(f"Drafters one behind the other draft chains of one row, not {scheme.name} drafts.")
        for one in self.members:
            if not isinstance(one, TextDrafter):
                one.check(scheme)

    def start(self, text: Text, session: Session) -> ByDepthState:
        """Start all members.

        Where one of them cannot draft the likeliest tokens at temperature 0, all draw; then rows of the others have no
        other tokens.
        """
        draws = session.params.temperature == 0 and self.defaults(session.params).scheme != TopK()
        sure = replace(session, params=LIKELIEST) if draws else session
        own = (one.start(text, sure if _takes_likeliest(one) else session) for one in self.members)
        return ByDepthState(tuple(own), session.vocab_size)

    def read(self, state: ByDepthState, text: Text, features: Features | None) -> ByDepthState:
        """Let all read the prompts."""
        own = [features, *[None] * (len(self.members) - 1)]
        states = zip(self.members, state.members, own, strict=True)
        return replace(state, members=tuple(one.read(before, text, seen) for one, before, seen in states))

    def draft(self, state: ByDepthState, request: DraftRequest) -> tuple[Draft, ByDepthState]:
        """Let one member draft behind the other, as deep as the policy's trees are."""
        left, members = request.policy.shape.depth, list(state.members)
        length = min(left, self.lengths[0])
        if not length:
            return Draft.nothing(request.text.last()), state
        chain, members[0] = self._stretch(0, state, request, length)
        drafted = tuple(chain.tree.valid.sum(dim=-1).sub(1).tolist())
        for place in range(1, len(self.members)):
            left -= length
            length = min(left, self.lengths[place])
            if not length or chain.failure is not None:
                break
            behind, members[place] = self._behind(place, state, request, chain, length)
            if behind.atoms.shape[1] > 1 or behind.failure is not None:
                chain = extended(chain, behind)
        return chain, replace(state, members=tuple(members), first=drafted)

    def commit(self, state: ByDepthState, step: Step) -> ByDepthState:
        """Tell the first member of its own drafts, text drafters of all; later members forget what was not kept."""
        members = list(state.members)
        if state.first:
            first = step.verdict.length.new_tensor(state.first)
            verdict = replace(
                step.verdict,
                path=step.verdict.path.where(step.verdict.path <= first.unsqueeze(-1), -1),
                length=step.verdict.length.minimum(first),
            )
            own = replace(step, verdict=verdict, whole=step.whole or step.verdict)
        else:
            own = step
        for place, one in enumerate(self.members):
            told = own if place == 0 and not isinstance(one, TextDrafter) else step
            if place:
                ends = zip(step.text.counts, step.verdict.kept, strict=True)
                for row, (count, kept) in enumerate(ends):
                    members[place] = cut(members[place], row, count + kept)
            if place == 0 or isinstance(one, TextDrafter):
                members[place] = one.commit(members[place], told)
        return replace(state, members=tuple(members), first=())

    def finish(self, state: ByDepthState, text: Text, row: int) -> ByDepthState:
        """Tell all."""
        pairs = zip(self.members, state.members, strict=True)
        return replace(state, members=tuple(finished(one, own, text, row) for one, own in pairs))

    def _stretch(self, place: int, state: ByDepthState, request: DraftRequest, length: int) -> tuple[Draft, Any]:
        """Let a member draft a chain behind a text."""
        one, own, text = self.members[place], state.members[place], request.text
        if isinstance(one, TextDrafter):
            bounds = Bounds(length, length, 1)
            found, own = one.guesses(own, text, bounds)
            return given(text, [each.within(bounds, state.vocab_size) for each in found], request.scheme), own
        draft, own = one.draft(own, replace(request, policy=Chain(length)))
        if not isinstance(draft, Draft):
            raise InvalidDraft(f"{one.name} drafts rows apart, and here all rows must have one draft.")
        return draft, own

    def _behind(
        self, place: int, state: ByDepthState, request: DraftRequest, chain: Draft, length: int
    ) -> tuple[Draft, Any]:
        """Let a later member draft behind a chain, with random numbers of its own; if it fails, what it drew."""
        noise = request.noise.fork(BY_DEPTH_STREAM + place).inside()
        own = replace(request, text=continued(request.text, chain), noise=noise, target=None)
        try:
            return self._stretch(place, state, own, length)
        except MENDABLE:
            raise
        except Exception as failure:
            record = noise.record
            drawn = None if record is None else record.only()
            if record is not None and record.numbers and drawn is None:
                raise
            draft = Draft.nothing(own.text.last()) if drawn is None else cast(Draft, drawn[0][0])
            return replace(draft, failure=failure), state.members[place]


def _takes_likeliest(one: Drafter) -> bool:
    with suppress(UnpairedScheme):
        one.check(TopK())
        return True
    return False


LIKELIEST = SamplingParams(temperature=1.0, top_k=1)
"""By which a draw is the likeliest token; at temperature 0 rows of drafts are the plain law, for its order."""
BY_DEPTH_STREAM = 0x4279446570
"""Names the random numbers that later members draw from."""


def _check_member(one: Drafter, *, later: bool) -> None:
    needs = one.needs
    if isinstance(one, SeveralDrafters):
        raise InvalidParameter(
            f"{one.name} drafts rows apart, and here all rows must have one draft; name its members."
        )
    if needs.riders:
        raise InvalidParameter(f"{one.name} needs tokens scored beside its drafts, and no drafter may follow these.")
    if later and needs.layers:
        raise InvalidParameter(
            f"{one.name} reads the target's hidden states, which drafts do not have; let it go first."
        )
    if later and needs.target:
        raise InvalidParameter(f"{one.name} looks at the target's keys, which drafts do not have; let it go first.")


def continued(text: Text, chain: Draft) -> Text:
    """Return texts with chains behind them, as far as these are there."""
    nodes = chain.atoms.shape[1]
    places = text.lengths.unsqueeze(-1) - 1 + torch.arange(nodes, device=text.lengths.device)
    tokens = torch.nn.functional.pad(text.tokens, (0, nodes))
    return Text(tokens.scatter(1, places, chain.tree.tokens), text.lengths - 1 + chain.tree.valid.sum(dim=-1))
