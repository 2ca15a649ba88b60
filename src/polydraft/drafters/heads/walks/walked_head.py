"""Heads that walk: a small state of each node is made of its parent's state and its token, and its row of the state.

With h the target's state behind its last norm at the token before the root, and t_0 the root's token:

    s_0 = begin(h);   s_{i+1} = read_i(s_i, t_i);   logits = rows_i(s_{i+1})

No keys are kept and no pass is run while a tree grows; what is known of the text is h. So the law of a node's children
depends on the whole path above it, and is fixed before they are drawn.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import BoundEnds, HeadEnds, MadeFor, of_parents, with_nodes
from polydraft.drafters.heads.last_state_heads import LastStateHead
from polydraft.models import LanguageModel
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier

States = Float[Tensor, "*b s"]
Output = Callable[[Float[Tensor, "*b d"]], Float[Tensor, "*b v"]]
"""The output rows of the target, of the head's tokens, for heads that have none of their own."""


class WalkedHead(LastStateHead):
    """A head whose rows follow from the states of a walk; derive from it.

    Attributes:
        depths: how many tokens deep it learnt to draft; nodes below are drafted as those at the last depth, by a law
            like any other, but a poor one.
        embeds: whether it reads the target's embeddings of the tokens, not tables of its own.
        vocab_size: how many tokens its own tables have; None where it has none.
        own_rows: how many output rows it has of its own, one for each of its tokens; None where it takes the target's.
    """

    depths: int
    embeds = False
    vocab_size: int | None = None
    own_rows: int | None = None

    @abstractmethod
    def begin(self, hidden: Float[Tensor, "*b w"]) -> States:
        """Return the state above the root, in the head's precision."""

    @abstractmethod
    def read(
        self,
        states: Float[Tensor, "*b w"],
        tokens: Int[Tensor, "*b"],
        embedded: Float[Tensor, "*b d"] | None,
        depth: int,
    ) -> States:
        """Return the states of nodes of a depth, the root's being 0.

        Args:
            states: those of the nodes above.
            tokens: the nodes' tokens.
            embedded: the target's embeddings of them, if the head reads these.
        """

    @abstractmethod
    def rows(self, states: States, depth: int, output: Output) -> Float[Tensor, "*b v"]:
        """Return the logits of the children of nodes of a depth."""

    def taught(self, final: Float[Tensor, "b t w"], valid: Bool[Tensor, "b t"]) -> Float[Tensor, "b t w"]:
        """Return what `begin` takes at every token of texts, made of the hidden states that it reads: these."""
        return final

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, no deeper than was learnt."""
        if params.temperature:
            return Defaults(IID(), Chain(self.depths))
        return Defaults(TopK(), BestFirst(12, depth=self.depths))

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Check that a target may have as many tokens as the head was trained for, and it knows all that it has."""
        MadeFor(self.vocab_size).check(target)
        MadeFor(self.own_rows if ends.tokens is None else None).check(target)

    def root(self, memory: Any, text: Text, ends: BoundEnds) -> "tuple[WalkPass, Any]":
        """Take the state of the token before the root."""
        begun = self.begin(memory.before_root(text))
        return WalkPass(self, ends, begun, begun[:, :0]), memory


@dataclass(eq=False)
class WalkPass:
    """The states of all nodes that have rows, in their order, below that of the token before the root."""

    head: WalkedHead
    ends: BoundEnds
    begun: Float[Tensor, "b 1 w"]
    states: Float[Tensor, "b n s"]
    overlap = None

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of one depth's nodes."""
        head, tokens = self.head, frontier.tokens
        above = of_parents(self.states, frontier) if frontier.depth else self.begun
        embedded = self.ends.embed(tokens).to(self.begun) if head.embeds else None
        known = tokens if head.vocab_size is None else tokens.clamp_max(head.vocab_size - 1)
        made = head.read(above, known, embedded, frontier.depth)
        self.states = with_nodes(self.states if frontier.depth else made[:, :0], frontier, made)
        return head.rows(made, frontier.depth, self.ends.output)
