"""What a drafter is: a few verbs and no hidden state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

import polydraft.rows as rows
from polydraft.models import LanguageModel, Layer
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Pieces, TreePolicy


@runtime_checkable
class Decoder(Protocol):
    """A decode loop as a value, for drafters that decode with a model of their own; the engine's own loop.

    Its state is `RowWise`: rows of it are put, cut and selected as those of a reader are.
    """

    def begin(
        self, model: LanguageModel, drafter: Any, verifier: Any, policy: TreePolicy, text: Text, session: "Session"
    ) -> Any:
        """Return the state of a loop over a text of which nothing was read.

        Args:
            model: the model whose law the loop follows, under the session's sampling settings.
            drafter: what drafts for it.
            verifier: what verifies these drafts.
            policy: the shape of their trees.
            text: the text.
            session: sampling settings and room.
        """
        ...

    def on(self, state: Any, text: Text, noise: Noise) -> Any:
        """Return the state over a text that agrees with the state's own up to what was committed, with fresh noise."""
        ...

    def read(self, state: Any, text: Text) -> Any:
        """Read a text but for its last tokens, which the first step would read else."""
        ...

    def step(self, state: Any) -> tuple[Any, Step]:
        """Take a step in all rows; what it emits is `step.verdict`."""
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
        target: the reader of the target, for views of its keys (`Reader.first_layers`, `Reader.compact`), and for the
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


@dataclass(frozen=True)
class Defaults:
    """What suits a drafter where the user names nothing.

    Args:
        scheme: the way of drawing drafts; the engine takes the best rule for it.
        policy: the shape of the trees.
    """

    scheme: Scheme
    policy: TreePolicy


@runtime_checkable
class Drafter(Protocol):
    """Proposes a token tree after the committed text. Derive from this class, which has an answer for every other verb.

    A drafter must have a `name`, and the verbs `check`, `start`, `draft` and `commit`.

    **The state** is an explicit value that the decode loop holds; what `draft` and `commit` return takes its place. It
    is None, or a frozen dataclass whose fields say how they go with the rows of a batch (`polydraft.rows`). A step that
    is interrupted is taken again from its beginning: `draft` or `commit` is then called once more with the state of
    before, and must do once more what it did. So whatever else changes goes into a new state, and keys and
    values only into slots that the next draft writes again, or that belong to the row which is joined. Random numbers
    come from `noise` alone.

    **A drafter that fails** loses nothing: the rows in which it fails are decoded without drafts to the end of their
    texts, which are all of a batch if its state has no row by itself. A proposal is
    checked (`SoundDrafter` names the exception). Drafts that the target has no token for are verified with the rest of
    their tree, as drafts that it gives no probability, and below a row that is no law of distinct tokens no draft
    counts. If the drafter raises, or if nothing can be verified, what `grow` drew is verified.

    **What stays exact.** To drop drafts because of what they are changes the law of the text. So draw with `grow`,
    once in a step and with nothing drawn besides: it keeps what was drawn before an error in `propose`
    (`Draft.failure`), and notes what it drew for an error behind it. Whoever draws otherwise must raise nothing after
    the first draw, and drop nothing that was drawn.

    Attributes:
        name: its name in tables.
        reads: which of the target's hidden states it reads; () for none.
        riders: the most riders that its drafts bring; the target's cache must have room for them.
        shares: whether it drafts from the target's keys, and is given the target's reader before each draft (`over`).
        proposes: whether it drafts at all.
        branches: whether its trees branch where the policy's are chains, as those of a merge do.
    """

    name: str
    reads: tuple[Layer, ...] = ()
    riders: int = 0
    shares: bool = False
    proposes: bool = True
    branches: bool = False

    @property
    def own_name(self) -> str:
        """The name under which drafts count that do not say where they come from (`Draft.source`)."""
        return self.name

    def defaults(self, params: SamplingParams) -> Defaults | None:
        """Return what suits this drafter under the target's sampling settings; None for what suits a draft model."""
        return None

    def models(self) -> tuple[LanguageModel, ...] | None:
        """Return the models whose passes it runs, each once; None where they are not known."""
        return None

    def networks(self) -> tuple[nn.Module, ...]:
        """Return the networks of its own that are no language models, such as a head's."""
        return tuple(value for value in vars(self).values() if isinstance(value, nn.Module))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` if the drafter cannot draft under this scheme."""
        ...

    def outside(self, row: int) -> bytes:
        """Return a digest of what is known of a row from outside its text, as it starts; nothing where nothing is.

        Outside are stores, predictions, and pools or tables that other texts filled. The engine asks once, before
        `start`, and forks the row's random numbers by the digest. Drafters around others hand on what these say
        (`known_outside`). It must be cheap, and the same as long as what is known is.

        Why: drafts keep the law of a text if they do not depend on its random numbers. A store may hold what the same
        seed wrote, and so drafts that follow from the numbers of that seed. With the digest, which has changed since
        the store grew by such a text, the numbers are independent of all that is in it. They are not where texts of one
        seed are written at the same time over one store that grows, which began with one digest, and where a prediction
        is the very text that its seed writes with it.
        """
        return b""

    def start(self, text: Text, session: Session) -> Any:
        """Return the first state for these texts, of which nothing was read."""
        ...

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Read prompts, or the next chunk of them.

        It is not called while nothing is to be drafted, unless the drafter reads hidden states.

        Args:
            state: the state of before.
            text: what may be read so far: the prompts, or their beginnings.
            features: the target's hidden states of what it read of them since the last call, if `reads` asks for any.
        """
        return state

    def over(self, state: Any, target: Reader) -> Any:
        """Take the target's reader of these rows as it is now; called before each draft of a drafter that `shares`."""
        return state

    def draft(
        self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, Any]:
        """Propose a tree below the last committed token of every row, its children drawn under `scheme`.

        A policy whose shape has no children asks for nothing, but for the state.

        Returns:
            the draft, or drafts by row; and the state with which the step goes on.
        """
        ...

    def commit(self, state: Any, step: Step) -> Any:
        """Learn what a step kept and found out; `step.text` is the text before it."""
        ...

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Take note that a row's text has come to its end, and what it is; called after the last step's `commit`.

        Rows that are finished may stay in the batch, and are drafted for though nobody takes their drafts. Whatever is
        kept outside the state must be kept once, though the step may be taken again.
        """
        return state

    def ended(self, state: Any) -> bool:
        """Tell whether nothing will ever be drafted from a state, so that no new text should join it."""
        return False

    def passes(self, depth: int) -> int:
        """Return how many passes of its own network a draft of so many levels takes: one for each, or what it says."""
        return depth

    def continues(self, state: Any) -> bool:
        """Tell whether a state, of a run that is over, is one from which this drafter can go on."""
        return False

    def carried(self, states: Sequence[Any], fresh: Any, known: int) -> Any:
        """Return what a new text can go on from, of all states of a run that is over; the fresh state if of none.

        What steps taught the drafter is left behind (`rows.reuse`): so a text is that of a call which begins anew, and
        a seed that wrote both does not verify what its own numbers led to.

        Args:
            states: the states: of this drafter, of those that it had inside, or of one that had this one inside.
            fresh: the state of the new text, of one row, of which nothing was read.
            known: how many tokens both texts begin with.
        """
        own = next((one for one in states if type(one) is type(fresh) and self.continues(one)), None)
        return fresh if own is None else rows.reuse(own, fresh, known)


@runtime_checkable
class SoundDrafter(Drafter, Protocol):
    """A drafter whose proposals need not be checked, whatever it draws."""

    @property
    def sound(self) -> bool:
        """Whether every proposal is a tree of the target's tokens, drawn from the rows that it reports."""
        ...


def is_sound(drafter: Drafter) -> bool:
    """Tell whether a drafter says that it is sound; a class derived from such a one must say so itself."""
    return "sound" in vars(type(drafter)) and isinstance(drafter, SoundDrafter) and drafter.sound


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
    kept = drafter.carried(states_in(state), fresh, known) if known else fresh
    return fresh if kept is fresh else rows.put(fresh, 0, kept)


def states_in(state: Any) -> list[Any]:
    """Return a state, and all that stand in it, such as those of a route's members."""
    return [] if state is None else [state, *(one for own in rows.inside(state) for one in states_in(own))]
