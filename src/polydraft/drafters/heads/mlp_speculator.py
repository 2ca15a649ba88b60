"""The MLP speculator: a state that takes in each drafted token, one small layer per depth (arXiv 2404.19124).

With h the target's last hidden state at token p, s_0 = h and t_0 the root's token at p + 1, depth i (from 0) makes

    s_{i+1} = gelu(ln_i(P_i s_i + c E_i[t_i]));   logits = H_i s_{i+1}
    ln(x) = w x / rms(x) + b;   c = w_e / w_s,  w_s = 2^(-1 / 2n),  w_e = sqrt((1 - w_s^2) d / 2)

of n depths and inner width d. So the law of a node's children depends on the whole path above it.

Source: foundation-model-stack/fms-extras, `models/speculator.py`; vllm-project/vllm, `models/mlp_speculator.py`.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import MadeFor, parents_of, with_nodes
from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.heads.last_state import LastStateHead, LastStates
from polydraft.drafters.heads.sublayers import Norm
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier


class SpeculatorStage(nn.Module):
    """One depth: a token and the state above it become a state, and logits."""

    def __init__(self, width: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, inner)
        self.proj = nn.Linear(width, inner, bias=False)
        self.ln = Norm(inner, 1e-6)
        self.shift = nn.Parameter(torch.zeros(inner))
        self.head = nn.Linear(inner, vocab, bias=False)

    def forward(self, states: Float[Tensor, "*b w"], tokens: Int[Tensor, "*b"], scale: float) -> Float[Tensor, "*b d"]:
        """Return the states behind these tokens; `scale` is c."""
        return nn.functional.gelu(self.ln(self.proj(states) + scale * self.emb(tokens)) + self.shift)


class MlpSpeculator(LastStateHead):
    """All depths of a speculator; nodes below the last one are drafted by it again, a law like any other, but poor.

    Args:
        width: the target's width.
        inner: the width d of the states.
        vocab: how many tokens embeddings and logits have.
        depths: how many stages n.
        scaled: whether the target's state is divided by sqrt(2) rms.

    Raises:
        InvalidParameter: there is no stage.
    """

    name = "mlp speculator"
    title = "An MLP speculator"

    def __init__(self, width: int, inner: int, vocab: int, depths: int, *, scaled: bool = False) -> None:
        super().__init__()
        if depths < 1:
            raise InvalidParameter(f"A speculator has at least one stage, but is to have {depths}.")
        self.width = self.target_width = width
        self.inner, self.vocab_size, self.scaled = inner, vocab, scaled
        self.stages = nn.ModuleList(SpeculatorStage(inner if depth else width, inner, vocab) for depth in range(depths))
        kept = 0.5 ** (0.5 / depths)
        self.scale = math.sqrt((1 - kept**2) * inner / 2) / kept

    def stage(self, depth: int) -> SpeculatorStage:
        """Return the stage of a depth, from 0."""
        return cast(SpeculatorStage, self.stages[min(depth, len(self.stages) - 1)])

    def begin(self, hidden: Float[Tensor, "*b w"]) -> Float[Tensor, "*b w"]:
        """Return the state above the first stage, in the head's precision."""
        hidden = hidden.to(self.stage(0).proj.weight)
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-6) / math.sqrt(2) if self.scaled else hidden

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, no deeper than there are stages."""
        deepest = len(self.stages)
        return Defaults(IID(), Chain(deepest)) if params.temperature else Defaults(TopK(), BestFirst(12, depth=deepest))

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Check that a target may have as many tokens as the speculator was trained for, and knows all that it has."""
        MadeFor(self.vocab_size).check(target)

    def root(self, memory: LastStates, text: Text, ends: BoundEnds) -> "tuple[SpeculatorPass, LastStates]":
        """Take the state of the token before the root."""
        begun = self.begin(memory.before_root(text))
        return SpeculatorPass(self, begun, begun.new_zeros(len(begun), 0, self.inner)), memory


@dataclass(eq=False)
class SpeculatorPass:
    """The states of all nodes that have rows, in their order, below that of the token before the root."""

    head: MlpSpeculator
    begun: Float[Tensor, "b 1 w"]
    states: Float[Tensor, "b n d"]
    overlap = None

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of one depth's nodes."""
        stage, tokens = self.head.stage(frontier.depth), frontier.tokens.clamp_max(self.head.vocab_size - 1)
        above = self.begun
        if frontier.depth:
            above = self.states.gather(1, parents_of(frontier).expand(-1, -1, self.states.shape[-1]))
        made = stage(above, tokens, self.head.scale)
        self.states = with_nodes(self.states, frontier, made)
        return stage.head(made)
