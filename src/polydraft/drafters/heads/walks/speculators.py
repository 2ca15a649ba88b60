"""Walks over tables of their own: IBM's MLP speculator, and Snowflake's with the gates of an LSTM.

An MLP speculator of n depths and inner width d (arXiv 2404.19124):

    s_0 = h;   s_{i+1} = gelu(ln_i(P_i s_i + c E_i[t_i]));   logits = H_i s_{i+1}
    ln(x) = w x / rms(x) + b;   c = w_e / w_s,  w_s = 2^(-1 / 2n),  w_e = sqrt((1 - w_s^2) d / 2)

Arctic's "sum_rnn" is the same. Its "sum_lstm" has gates, of which each may have a table of its own:

    a_x = c E_x[t];   f, i, o = sigmoid(F s + a_f), sigmoid(I s + a_i), sigmoid(O s + a_o);   g = gelu(ln_1(G s + a_g))
    cell <- f cell + i g;   s <- o gelu(ln_2(cell));   logits = H s;   the first F, I, O, G read h, and cell_0 = 0

Sources: foundation-model-stack/fms-extras, `models/speculator.py`; snowflakedb/ArcticInference,
`vllm/spec_dec/arctic_speculator.py`; snowflakedb/ArcticTraining, `projects/arctic_lstm_speculator`.
"""

import math
from collections.abc import Mapping
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.sublayers import Norm
from polydraft.drafters.heads.walks.walked_head import Output, States, WalkedHead
from polydraft.errors import InvalidParameter

GATES = ("forget", "input", "output", "cell")
"""The names of an LSTM's projections and tables; "cell" is that of what is written."""


class ShiftedNorm(nn.Module):
    """Divide by the root mean square, then scale by learnt weights and shift by learnt biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.shift = Norm(width, 1e-6), nn.Parameter(torch.zeros(width))

    def forward(self, states: States) -> States:
        """Return the changed states."""
        return self.norm(states) + self.shift


class SpeculatorStage(nn.Module):
    """One depth: a token and the state above it become a state, and logits."""

    def __init__(self, width: int, inner: int, vocab: int, rows: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, inner)
        self.proj = nn.Linear(width, inner, bias=False)
        self.ln = ShiftedNorm(inner)
        self.lm_head = nn.Linear(inner, rows, bias=False)

    def forward(self, states: Float[Tensor, "*b w"], tokens: Int[Tensor, "*b"], scale: float) -> States:
        """Return the states behind these tokens; `scale` is c."""
        return nn.functional.gelu(self.ln(self.proj(states) + scale * self.emb(tokens)))


class GatedStep(nn.Module):
    """How an LSTM speculator's s and cell become the next ones; `width` is that of the s that comes in."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.ModuleDict({gate: nn.Linear(width, inner, bias=False) for gate in GATES})
        self.cell_ln, self.state_ln = ShiftedNorm(inner), ShiftedNorm(inner)

    def forward(
        self, state: Float[Tensor, "*b w"], cell: Float[Tensor, "*b c"], read: Mapping[str, States]
    ) -> tuple[States, States]:
        """Return the next s and cell.

        Args:
            cell: of no width where there is none yet.
            read: what each gate makes of the token.
        """
        gates = {name: proj(state) + read[name] for name, proj in self.proj.items()}
        written = torch.sigmoid(gates["input"]) * nn.functional.gelu(self.cell_ln(gates["cell"]))
        cell = torch.sigmoid(gates["forget"]) * cell + written if cell.shape[-1] else written
        return torch.sigmoid(gates["output"]) * nn.functional.gelu(self.state_ln(cell)), cell


class GatedStage(GatedStep):
    """One depth of an LSTM speculator: its state is s and the cell, joined.

    Args:
        width: of the s that comes in; at the first depth that of h, which comes without a cell.
        shared: whether the gates share one table.
    """

    def __init__(self, width: int, inner: int, vocab: int, rows: int, *, shared: bool) -> None:
        super().__init__(width, inner)
        names = GATES[:1] if shared else GATES
        self.emb = nn.ModuleDict({gate: nn.Embedding(vocab, inner) for gate in names})
        self.lm_head = nn.Linear(inner, rows, bias=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  tokens in the room of what gates make of them
        self, states: Float[Tensor, "*b w"], tokens: Int[Tensor, "*b"], scale: float
    ) -> States:
        """Return the states behind these tokens; `scale` is c."""
        width = cast(nn.Linear, self.proj["cell"]).in_features
        read = {gate: scale * self._table(gate)(tokens) for gate in self.proj}
        return torch.cat(super().forward(states[..., :width], states[..., width:], read), dim=-1)

    def _table(self, gate: str) -> nn.Module:
        return self.emb[gate if gate in self.emb else GATES[0]]


class MlpSpeculator(WalkedHead):
    """All depths of a speculator.

    Args:
        width: the target's width.
        inner: the width d of the states.
        vocab_size: how many tokens embeddings have.
        depths: how many stages n.
        rows: how many tokens logits have; None for as many as embeddings.
        scaled: whether the target's state is divided by sqrt(2) rms.

    Raises:
        InvalidParameter: there is no stage.
    """

    name = "mlp speculator"
    title = "An MLP speculator"

    def __init__(
        self, width: int, inner: int, vocab_size: int, depths: int, *, rows: int | None = None, scaled: bool = False
    ) -> None:
        super().__init__()
        if depths < 1:
            raise InvalidParameter(f"A speculator has at least one stage, but is to have {depths}.")
        self.width = self.target_width = width
        self.inner, self.scaled, self.depths = inner, scaled, depths
        self.vocab_size, self.own_rows = vocab_size, vocab_size if rows is None else rows
        self.tables = vocab_size, self.own_rows
        self.stages = nn.ModuleList(self._made(inner if depth else width) for depth in range(depths))
        kept = 0.5 ** (0.5 / depths)
        self.scale = math.sqrt((1 - kept**2) * inner / 2) / kept

    def _made(self, width: int) -> nn.Module:
        return SpeculatorStage(width, self.inner, *self.tables)

    def stage(self, depth: int) -> nn.Module:
        """Return the stage of a depth, from 0."""
        return self.stages[min(depth, len(self.stages) - 1)]

    def begin(self, hidden):
        """Return the target's state, evened if the head is scaled."""
        hidden = hidden.to(next(self.parameters()))
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-6) / math.sqrt(2) if self.scaled else hidden

    def read(self, states, tokens, embedded, depth):
        """Return the stage's states; its tables are its own."""
        return self.stage(depth)(states, tokens, self.scale)

    def rows(self, states: States, depth: int, output: Output) -> Float[Tensor, "*b v"]:
        """Return the stage's own rows."""
        return cast(nn.Linear, self.stage(depth).lm_head)(states)


class LstmSpeculator(MlpSpeculator):
    """Arctic's speculator with gates; arguments as for `MlpSpeculator`.

    Args:
        shared: whether the gates share one table.
    """

    name = "lstm speculator"
    title = "An LSTM speculator"

    def __init__(
        self,
        width: int,
        inner: int,
        vocab_size: int,
        depths: int,
        *,
        rows: int | None = None,
        scaled: bool = False,
        shared: bool = True,
    ) -> None:
        self.shared = shared
        super().__init__(width, inner, vocab_size, depths, rows=rows, scaled=scaled)

    def _made(self, width: int) -> nn.Module:
        return GatedStage(width, self.inner, *self.tables, shared=self.shared)

    def rows(self, states: States, depth: int, output: Output) -> Float[Tensor, "*b v"]:
        """Return the rows of s, which stands before the cell."""
        return super().rows(states[..., : self.inner], depth, output)
