"""One generation in progress: an iterator of blocks that counts as it goes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Drafter, Text
from polydraft.engine.block import Block, Statistics
from polydraft.engine.decode import check_drafting, check_room, decode
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw
from polydraft.engine.wrappers.watched import Watched
from polydraft.models import LanguageModel
from polydraft.probs import Noise
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that determines a generation but its random numbers.

    Args:
        target, drafter, verifier, policy: those of `Method`.
        prompt: the prompts.
        laws: per row, how the target's logits become distributions.
        limits: per row, when it ends.
        keeps_scores: whether blocks hold the target's logits and scores.
        fallback: why nothing is drafted whatever was asked for; else empty.
    """

    target: LanguageModel
    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    prompt: Text
    laws: tuple[TargetLaw, ...]
    limits: tuple[Limits, ...]
    keeps_scores: bool = False
    fallback: str = ""


class Run:
    """Iterate over the blocks of a generation; `statistics` and `new_tokens` grow with every block.

    Stopping early loses nothing: what was generated so far stays here. Time between blocks, when the caller has the
    floor, is not counted.
    """

    def __init__(self, setup: Setup, noise: Noise) -> None:
        check_room(setup.prompt, setup.limits)
        check_drafting(setup.drafter, setup.verifier, setup.policy)
        self.setup = setup
        self.statistics = Statistics(fallback=setup.fallback, in_force=setup.laws[0].in_force)
        self.new_tokens: list[list[int]] = [[] for _ in setup.prompt.lengths]
        self.finish: list[str] = [""] * len(self.new_tokens)
        self._watched = Watched(setup.target, setup.drafter, setup.verifier, setup.policy, setup.keeps_scores)
        self._blocks = decode(self._watched.method, setup.prompt, setup.laws, setup.limits, noise)
        lengths = setup.prompt.lengths.tolist()
        left = max(limit.max_length - length for limit, length in zip(setup.limits, lengths, strict=True))
        self._watched.opens(max(lengths), left, len(lengths), setup.laws[0].params.temperature > 0)

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        with self._watched.counting(self.statistics):
            block = next(self._blocks)
        self.statistics.add(block)
        self._watched.learn(block)
        for row, gained in block.rows.items():
            self.new_tokens[row].extend(gained.tokens)
            self.finish[row] = gained.finish
        return block

    def exhaust(self) -> "Run":
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def sequences(self, prompt: Int[Tensor, "b t"], pad: int) -> Int[Tensor, "b s"]:
        """Return the prompts as given, followed by the new tokens, right-padded with `pad`."""
        longest = max(map(len, self.new_tokens))
        rows = [tokens + [pad] * (longest - len(tokens)) for tokens in self.new_tokens]
        new = torch.tensor(rows, dtype=prompt.dtype, device=prompt.device).view(len(rows), longest)
        return torch.cat([prompt, new], dim=-1)
