"""What a drafter is: a few verbs and no hidden state."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from torch import Tensor, nn

import polydraft.rows as rows
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import LanguageModel, Layer
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Pieces, TreePolicy


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of 16 bytes of some strings of bytes, which tells where one ends."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


HOLDERS, PLAIN = (tuple, list, dict), (type(None), bool, int, float, str, bytes, np.ndarray, np.generic, Tensor)


@runtime_checkable
class Decoder(Protocol):
    """A decode loop as a value, for drafters that decode with a model of their own; the engine's own loop.

    Its state is `RowWise`: rows of it are put, cut and selected as those of a reader are.
    """

    def begin(
        self,
        model: LanguageModel | Reader,
        drafter: Any,
        verifier: Any,
        policy: TreePolicy,
        text: Text,
        session: "Session",
    ) -> Any:
        """Return the state of a loop over a text of which nothing was read.

        It follows the law of the model under the session's sampling settings; the verifier verifies what is drafted.

        Args:
            model: the model, which reads the text with keys of its own; or a reader that does so, whose keys are lent
                to the loop for each draft.
            drafter: who drafts for it.
            verifier: the rule by which it keeps drafts.
            policy: its trees.
            text: the texts.
            session: sampling settings, and key slots.
        """
        ...

    def lent(self, state: Any, reader: Reader | None) -> Any:
        """Return the loop over a reader's keys, which has read all but the last tokens; None gives them back."""
        ...

    def on(self, state: Any, text: Text, noise: Noise) -> Any:
        """Return the state over a text that agrees with the state's own up to what was committed, with fresh noise."""
        ...

    def read(self, state: Any, text: Text) -> Any:
        """Read a text but for its last tokens, which the first step would read else."""
        ...

    def step(self, state: Any, *, mends: bool = False) -> tuple[Any, Step]:
        """Take a step in all rows; what it emits is `step.verdict`.

        Errors of what drafts inside are raised, or cost the loop its drafts if the step `mends` them.
        """
        ...

    def drafts(self, state: Any) -> Any:
        """Return the state of the loop's drafter; of a loop whose rows all began with the same drafter."""
        ...

    def drafting(self, state: Any, drafts: Any) -> Any:
        """Return the loop with another state of its drafter, for whoever knows more than the loop has seen."""
        ...


@dataclass(frozen=True)
class Session:
    """What a drafter is told at the start.

    Args:
        params: how the target's rows are made; a guide for the draft's own temperature.
        capacity: key slots that a cache needs for the longest text and one tree.
        vocab_size: the target's number of tokens; no draft may lie beyond it.
        target: the reader of the target, for views of its keys (`Reader.viewed`, `Reader.over`), and for the
            target's embedding and output head, which heads share (`target.model`).
        decoder: the decode loop, for decoders inside decoders.
        sources: per row what the target reads beside the text, such as an encoder's input.
    """

    params: SamplingParams
    capacity: int
    vocab_size: int
    target: Reader | None = None
    decoder: Decoder | None = None
    sources: Sequence[Any] | None = None


def loop_inside(name: str, session: Session, params: SamplingParams) -> tuple[Decoder, Session]:
    """Return the decode loop for a model of a drafter's own, and the session of that model.

    Raises:
        InvalidParameter: the session has no loop.
    """
    if session.decoder is None:
        raise InvalidParameter(f"The {name} drafter needs a decode loop (Session.decoder), but was given none.")
    return session.decoder, replace(session, params=params, target=None, sources=None)


@dataclass(frozen=True)
class Defaults:
    """What suits a drafter where the user names nothing; the engine takes the best rule for the scheme."""

    scheme: Scheme
    policy: TreePolicy


@dataclass(frozen=True)
class Needs:
    """What a drafter needs beside the texts.

    Args:
        layers: which of the target's hidden states it reads; () for none.
        riders: the most riders that its drafts bring; the target's cache must have room for them.
        target: whether it drafts from the target's keys (`DraftRequest.target`).
        queries: of how many of the newest tokens it reads the target's queries (`Features.queries`).
        slots: of the target's cache that it writes to beyond the largest tree, behind the committed text.
        branches: whether a node may have as many guesses as the policy gives it drafts beside these, as in a merge.
        passes: of its own network that a draft takes; None for one for each level.
    """

    layers: tuple[Layer, ...] = ()
    riders: int = 0
    target: bool = False
    queries: int = 0
    slots: int = 0
    branches: bool = False
    passes: int | None = None

    def most_children(self, policy: TreePolicy) -> int:
        """Return the most drafts that a node of its trees may have, whatever is drawn."""
        return policy.largest.max_children * (1 + self.branches)


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """What a drafter is asked for in a step.

    Args:
        text: the committed tokens.
        scheme: how the drafts are to be drawn.
        policy: the trees; one whose shape has no children asks for nothing, but for the state.
        noise: the rows' random numbers.
        target: the target's reader of these rows as it is now, for a drafter that needs it.
    """

    text: Text
    scheme: Scheme
    policy: TreePolicy
    noise: Noise
    target: Reader | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes a token tree after the committed text. Derive from this class.

    A drafter must have a `name`, and the verbs `check`, `start`, `draft` and `commit`.

    **The state** is an explicit value that the decode loop holds; what `draft` and `commit` return takes its place. It
    is None, or a frozen dataclass whose fields say how they go with the rows of a batch (`polydraft.rows`). A step that
    is interrupted is taken again from its beginning: `draft` or `commit` is then called once more with the state of
    before, and must do once more what it did. So whatever else changes goes into a new state, and keys and values only
    into slots that the next draft writes again. Random numbers come from the request's `noise` alone.

    **A drafter that fails** loses nothing: the rows in which it fails are decoded without drafts to the end of their
    texts, which are all of a batch if its state has no row by itself. A proposal is
    checked (`SoundDrafter` names the exception). Drafts that the target has no token for are verified with the rest of
    their tree, as drafts that it gives no probability, and below a row that is no law of distinct tokens no draft
    counts. If the drafter raises, or if nothing can be verified, what `grow` drew is verified.

    **What stays exact.** To drop drafts because of what they are changes the law of the text. So draw with `grow`,
    once in a step and with nothing drawn besides: it keeps what was drawn before an error in `propose`
    (`Draft.failure`), and notes what it drew for an error behind it. Whoever draws otherwise must raise nothing after
    the first draw, and drop nothing that was drawn.

    **What more a drafter may be.** `Outside` knows something from outside the texts, `Collects` is told of texts that
    are over. One around another may have an `own_name`, under which drafts count that do not say where they come from
    (`Draft.source`); one that drafts nothing says that it `proposes` not. Models, networks and other drafters that it
    works with stand in its fields (`owned_models`).

    Attributes:
        name: its name in tables.
        needs: what it needs beside the texts.
    """

    name: str
    needs: Needs = Needs()

    def defaults(self, params: SamplingParams) -> Defaults | None:
        """Return what suits this drafter under the target's sampling settings; None for what suits a draft model."""
        return None

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` if the drafter cannot draft under this scheme."""
        ...

    def start(self, text: Text, session: Session) -> Any:
        """Return the first state for these texts, of which nothing was read."""
        ...

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Read prompts, or the next chunk of them.

        It is not called while nothing is to be drafted, unless the drafter reads hidden states.

        Args:
            state: the state of before.
            text: what may be read so far: the prompts, or their beginnings.
            features: the target's hidden states of what it read of them since the last call, if any are needed.
        """
        return state

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft | Pieces, Any]:
        """Propose a tree below the last committed token of every row, its children drawn under the request's scheme.

        Returns:
            the draft, or drafts by row; and the state with which the step goes on.
        """
        ...

    def commit(self, state: Any, step: Step) -> Any:
        """Learn what a step kept and found out; `step.text` is the text before it."""
        ...


@runtime_checkable
class ByTextDrafter(Drafter, Protocol):
    """A drafter that may say that its drafts follow from the text alone, whatever was drafted before."""

    by_text_alone: bool


def is_by_text_alone(drafter: Drafter) -> bool:
    """Tell whether a drafter's tokens are fixed by the text."""
    return isinstance(drafter, ByTextDrafter) and drafter.by_text_alone


@runtime_checkable
class StretchedDrafter(Drafter, Protocol):
    """A drafter whose chains are drawn from the rows of others."""

    def stretches(self, length: int) -> list[tuple[Drafter, int]]:
        """Return whose rows a chain of so many drafts is drawn from, from the top down, and how many are each one's.

        Raises:
            InvalidParameter: that hangs on what each of them finds, or on what became of earlier steps.
        """
        ...


def stretches(drafter: Drafter, length: int) -> list[tuple[Drafter, int]]:
    """Return the stretches of a chain, which is one unless the drafter says so; errors are its own."""
    return drafter.stretches(length) if isinstance(drafter, StretchedDrafter) else [(drafter, length)]


@runtime_checkable
class SoundDrafter(Drafter, Protocol):
    """A drafter whose proposals need not be checked, whatever it draws."""

    @property
    def sound(self) -> bool:
        """Whether every proposal is a tree of the target's tokens, drawn from the rows that it reports."""
        ...


@runtime_checkable
class Views(Drafter, Protocol):
    """A drafter that drafts with a view of the target, on which a loop may run instead (`NestedDrafter`)."""

    def viewed(self, state: Any, text: Text, target: Reader, room: int) -> tuple[Reader, Any]:
        """Return a reader that has read all but the last tokens, and the state with which the step goes on.

        Args:
            state: the drafter's.
            text: the committed tokens.
            target: the target's reader of these rows, whose keys the view looks at.
            room: how many slots behind the text it must have to write to.
        """
        ...


@runtime_checkable
class ChecksTarget(Protocol):
    """A drafter that not every target can have, such as one by a view of layers that a target may not have."""

    def check_target(self, target: LanguageModel) -> object:
        """Raise an error that says why a target cannot have it, where `start` would; a view returns its model."""
        ...


@runtime_checkable
class Outside(Protocol):
    """A drafter that knows something from outside a text: a store, a prediction, what other texts wrote."""

    def outside(self, row: int) -> bytes:
        """Return a digest of what is known of a row from outside its text, as it starts; nothing where nothing is.

        The engine asks once, before `start`, and forks the row's random numbers by the digests of a drafter and of
        those inside (`known_outside`). It must be cheap, and the same as long as what is known is.

        Why: drafts keep the law of a text if they do not depend on its random numbers. A store may hold what the same
        seed wrote, and so drafts that follow from the numbers of that seed. With the digest, which has changed since
        the store grew by such a text, the numbers are independent of all that is in it. They are not where texts of one
        seed are written at the same time over one store that grows, which began with one digest, and where a prediction
        is the very text that its seed writes with it.
        """
        ...


@runtime_checkable
class Collects(Protocol):
    """A drafter that is told of texts that are over."""

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Take note that a row's text has come to its end, and what it is; called after the last step's `commit`.

        Rows that are finished may stay in the batch, and are drafted for though nobody takes their drafts. Whatever is
        kept outside the state must be kept once, though the step may be taken again.
        """
        ...


def has_store(drafter: Drafter) -> bool:
    """Tell whether a drafter, or one inside, reads a store, which other processes may write."""
    return any(getattr(one, "store", None) is not None for one in drafters_in(drafter))


def is_sound(drafter: Drafter) -> bool:
    """Tell whether a drafter says that it is sound; a class derived from such a one must say so itself."""
    return "sound" in vars(type(drafter)) and cast(SoundDrafter, drafter).sound


def drafts_under(drafter: Drafter, scheme: Scheme) -> bool:
    """Tell whether a drafter can draft under a scheme."""
    try:
        drafter.check(scheme)
    except UnpairedScheme:
        return False
    return True


def proposes(drafter: Drafter) -> bool:
    """Tell whether a drafter drafts at all: unless it says that it does not."""
    return getattr(drafter, "proposes", True)


def drafts_name(drafter: Drafter) -> str:
    """Return the name under which drafts count that do not say where they come from."""
    return getattr(drafter, "own_name", drafter.name)


def finished(drafter: Drafter, state: Any, text: Text, row: int) -> Any:
    """Tell a drafter that a text is over, if it wants to know."""
    return drafter.finish(state, text, row) if isinstance(drafter, Collects) else state


def drafters_in(drafter: Drafter) -> list[Drafter]:
    """Return a drafter and all that stand in its fields, and in theirs, each once."""
    found, waiting = dict[int, Drafter](), [drafter]
    while waiting:
        one = waiting.pop(0)
        if id(one) not in found:
            found[id(one)] = one
            waiting = [*(value for value in _owned(one) if isinstance(value, Drafter)), *waiting]
    return [*found.values()]


def check_target(drafter: Drafter, target: LanguageModel) -> None:
    """Let a drafter and those in its fields check the target that they are to draft for, before a text is begun.

    Raises:
        PolydraftError: it cannot have one of them; the text says why.
    """
    if isinstance(drafter, ChecksTarget):
        drafter.check_target(target)
        return
    for inner in _owned(drafter):
        if isinstance(inner, Drafter):
            check_target(inner, target)


def owned_models(drafter: Drafter) -> tuple[LanguageModel, ...]:
    """Return the language models whose passes a drafter runs, each once: those in fields, its own or inner ones'."""
    found = [value for one in drafters_in(drafter) for value in _owned(one) if isinstance(value, LanguageModel)]
    return tuple({id(model): model for model in found}.values())


def owned_networks(drafter: Drafter) -> tuple[nn.Module, ...]:
    """Return the networks of a drafter that are no language models, such as a head's."""
    found = [value for one in drafters_in(drafter) for value in _owned(one) if isinstance(value, nn.Module)]
    return tuple({id(network): network for network in found}.values())


def known_outside(drafter: Drafter, row: int) -> bytes:
    """Return the digest of what a drafter and those inside know of a row from outside; of a single one, its own."""
    told: list[object] = [one.outside(row) for one in drafters_in(drafter) if isinstance(one, Outside)]
    for one in told:
        if not isinstance(one, bytes):
            raise TypeError(f"outside must return bytes, but is {type(one).__name__}.")
    known = [digest for digest in told if isinstance(digest, bytes) and digest]
    return digest_of(*known) if len(known) > 1 else b"".join(known)


def resumed(drafter: Drafter, state: Any, known: int, text: Text, session: Session) -> Any:
    """Start a drafter on a text of one row that begins like another; the other's state stays as it is.

    Args:
        drafter: the drafter.
        state: its state for the other text, that of a route in which it took part, or anything else.
        known: how many tokens both begin with.
        text: the text.
        session: as for `start`.
    """
    fresh = drafter.start(text, session)
    if not known:
        return fresh
    with suppress(Exception):  # a state that cannot be taken over begins anew
        kept = rows.carried(rows.within(state), fresh, known)
        return fresh if kept is fresh else rows.put(fresh, 0, kept)
    return drafter.start(text, session)


def _owned(drafter: Drafter) -> list[Any]:
    """Return the objects that stand in a drafter's fields, also in tuples, lists and the values of dicts."""
    slots = [name for kind in type(drafter).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [*getattr(drafter, "__dict__", {}).values(), *(getattr(drafter, name, None) for name in slots)]
    return [one for value in values for one in _objects(value)]


def _objects(value: Any) -> Iterator[Any]:
    """Return what is no plain value of a value, and of what it holds; of a dict no more than its own values."""
    if isinstance(value, tuple | list):
        for one in cast(Sequence[Any], value):
            yield from _objects(one)
    elif isinstance(value, dict):
        yield from (one for one in cast(dict[Any, Any], value).values() if not isinstance(one, (*HOLDERS, *PLAIN)))
    elif not isinstance(value, PLAIN):
        yield value
