"""What a drafter is: a few verbs and no hidden state."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from polydraft.probs import Noise, SamplingParams
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TreePolicy, Verdict


@dataclass(frozen=True, eq=False)
class Text:
    """The committed tokens of a batch: right-padded rows and their lengths.

    Args:
        tokens: token ids; anything beyond a row's length.
        lengths: committed tokens per row, at least 1.
    """

    tokens: Int[Tensor, "b t"]
    lengths: Int[Tensor, "b"]

    def last(self, back: int = 1) -> Int[Tensor, "b"]:
        """Return the last committed token of each row, or the one `back` places from the end (the first at least)."""
        place = (self.lengths - back).clamp_min(0).unsqueeze(-1)
        return self.tokens.gather(-1, place).squeeze(-1)


@dataclass(frozen=True)
class Session:
    """What a drafter is told at the start.

    Args:
        params: how the target's rows are made; a guide for the draft's own temperature.
        capacity: key slots that a cache needs for the longest text and one tree.
        vocab_size: the target's number of tokens; no draft may lie beyond it.
        idle: nothing is to be drafted for now, so that prompts need not be read yet.
    """

    params: SamplingParams
    capacity: int
    vocab_size: int
    idle: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes a token tree after the committed text.

    **The state** is an explicit value that the decode loop holds; the one that `commit` returns takes its place. A step
    that is interrupted is taken again from its beginning: `draft`, `commit` or `join` is then called once more with the
    state of before, and must do once more what it did. So whatever else changes goes into a new state, and keys and
    values only into slots that the next draft writes again, or that belong to the row which is joined. Random numbers
    come from `noise` alone.

    **A drafter that fails** loses nothing: the rest is decoded without drafts. A proposal is checked (`SoundDrafter`
    names the exception). Drafts that the target has no token for are verified with the rest of their tree, as drafts
    that it gives no probability, and below a row that is no distribution no draft counts. If nothing can be verified,
    or if the drafter raises, the whole proposal is dropped.

    **What stays exact.** To drop drafts because of what they are changes the law of the text. A failure before the
    first draw does no harm, nor one that has nothing to do with the tokens drawn. So draw with `grow`, which keeps what
    was drawn before an error in `propose` (`Draft.failure`), or raise nothing after the first draw.
    """

    @property
    def name(self) -> str:
        """The drafter's name in tables."""
        ...

    @property
    def reads_hidden(self) -> tuple[int, ...]:
        """Which of the target's layers the drafter reads; () for none."""
        ...

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` if the drafter cannot draft under this scheme."""
        ...

    def start(self, text: Text, session: Session) -> Any:
        """Read the prompts and return the first state."""
        ...

    def draft(self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Propose a tree below the last committed token of every row, its children drawn under `scheme`."""
        ...

    def commit(self, state: Any, text: Text, verdict: Verdict) -> Any:
        """Take note of what was kept; `text` is the text that the tree was drafted for, before the commit."""
        ...

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Put the only row of another state of this drafter in place of a row, when a new text takes its slot."""
        ...


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


@runtime_checkable
class ResumingDrafter(Drafter, Protocol):
    """A drafter that reads of a longer text only what is new."""

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> Any:
        """Start on a text of one row that begins like another, and leave the other's state as it is.

        Args:
            state: what a drafter's last `commit` for the other text returned; if it is none of this drafter's, or of
                another model, the whole text is read.
            before: the other text.
            text: the text.
            known: how many tokens both begin with.
            session: as for `start`.
        """
        ...


def resumed(drafter: Drafter, state: Any, before: Text, text: Text, known: int, session: Session) -> Any:
    """Resume a drafter that can; start any other. A class derived from one that can must say so itself."""
    if "resume" in vars(type(drafter)) and isinstance(drafter, ResumingDrafter):
        return drafter.resume(state, before, text, known, session)
    return drafter.start(text, session)
