"""Jacobi's iteration over blocks of a text: all blocks at once, each behind the text's own tokens.

A block of n guesses stands behind place r of a text. A pass reads the guesses behind the text up to r; then the
likeliest token of each row is the next guess for the place behind it. The first guess of all is right after one pass,
the second after two, and so on: after n passes at most nothing changes any more.

    y_{j+1}(i) = argmax f(. | x_{<= r}, y_j(1), ..., y_j(i - 1))        i = 1, ..., n

Two kinds of iteration are made here. A model's own ends in its greedy continuation. The iteration *towards a text* has
the text's token in the room of the likeliest one wherever all guesses before it are the text's: its last state is the
text, whether that was written greedily or drawn, and whoever wrote it. Where the text is the model's own greedy one,
both are the same.

One pass reads a text and all blocks behind it: a guess sees the text up to its block's root and the guesses of its own
block before it.

Source: Santilli et al., arXiv 2305.10427; CLLM (arXiv 2403.00835, section 3.1).
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from polydraft.probs import Noise
from polydraft.training.alignment.draft_training import splits
from polydraft.training.heads.losses.row_losses import STATES
from polydraft.training.heads.shards import Shards

GUESSES = "guesses"
TEXTS = 4
"""Of how many texts trajectories are made at once."""


def block_roots(length: int, size: int) -> Int[Tensor, " B"]:
    """Return the places behind which a text's blocks stand, one block behind another; the last one ends in the text."""
    return torch.arange(size - 1, length - size, size)


def answers_of(ids: Int[Tensor, "b t"], size: int) -> Int[Tensor, "b B n"]:
    """Return the text's own tokens in each block."""
    return ids[:, block_roots(ids.shape[1], size).unsqueeze(-1) + 1 + torch.arange(size)]


def repeating(ids: Int[Tensor, "b t"], size: int) -> Bool[Tensor, "b B"]:
    """Tell which blocks say again what stands up to a block's length before them: those teach no more than to repeat.

    The block behind r is x_{r+1}, ..., x_{r+n}. It repeats if x_i = x_{i-p} in all of it for a p of 1 to n.
    """
    roots = block_roots(ids.shape[1], size).to(ids.device)
    places = roots.unsqueeze(-1) + 1 + torch.arange(size, device=ids.device)
    found = torch.zeros(len(ids), len(roots), dtype=torch.bool, device=ids.device)
    for period in range(1, size + 1):
        found |= (ids[:, places] == ids[:, (places - period).clamp_min(0)]).all(-1) & (roots + 1 >= period)
    return found


class BlockStates(NamedTuple):
    """What a model's rows are made of: at the places of texts, and at the guesses of their blocks."""

    text: Float[Tensor, "b t d"]
    guesses: Float[Tensor, "b B n d"]


class BlockReader:
    """Reads texts and the blocks behind them in one pass.

    Args:
        network: a causal model.
        vocab_size: how many of its tokens rows have; it may have more.
    """

    def __init__(self, network: PreTrainedModel, vocab_size: int) -> None:
        self.network, self.vocab_size, self.splits = network, vocab_size, splits(network)
        self.known = network.config.get_text_config().vocab_size

    def states(self, ids: Int[Tensor, "b t"], guesses: Int[Tensor, "b B n"]) -> BlockStates:
        """Return the states of texts and guesses."""
        length, size = ids.shape[1], guesses.shape[-1]
        roots = block_roots(length, size)
        places = torch.cat([torch.arange(length), (roots.unsqueeze(-1) + 1 + torch.arange(size)).flatten()])
        precision, device = next(self.network.parameters()).dtype, ids.device
        hidden = torch.zeros(len(places), len(places), dtype=precision)
        hidden.masked_fill_(~block_mask(length, size), torch.finfo(precision).min)
        own: dict[str, Any] = {
            "input_ids": torch.cat([ids, guesses.flatten(1).to(ids)], 1).clamp_max(self.known - 1),
            "attention_mask": hidden.to(device).expand(len(ids), 1, -1, -1),
            "position_ids": places.to(device).expand(len(ids), -1),
            "use_cache": False,
        }
        if self.splits:
            found = cast(Any, self.network).get_decoder()(**own).last_hidden_state
        else:
            found = self.network(**own).logits
        return BlockStates(found[:, :length], found[:, length:].unflatten(1, guesses.shape[1:]))

    def logits(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Return the rows of states."""
        made = cast(nn.Module, self.network.get_output_embeddings())(states) if self.splits else states
        return made[..., : self.vocab_size].float()

    def likeliest(self, states: Float[Tensor, "*b d"]) -> Int[Tensor, "*b"]:
        """Return the likeliest tokens of states, of whose rows a part is made at a time."""
        parts = [self.logits(part).argmax(-1) for part in states.flatten(0, -2).split(STATES)]
        return torch.cat(parts).view(states.shape[:-1])


def block_mask(length: int, size: int) -> Bool[Tensor, "e e"]:
    """Tell what sees what, the text's places first, and then each block's guesses."""
    roots = block_roots(length, size)
    count = len(roots)
    seen = torch.zeros(length + count * size, length + count * size, dtype=torch.bool)
    seen[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril_()
    seen[length:, :length] = (torch.arange(length) <= roots.unsqueeze(-1)).repeat_interleave(size, 0)
    seen[length:, length:] = torch.block_diag(*[torch.ones(size, size).tril_()] * count).bool()
    return seen


@torch.no_grad()
def jacobi_states(
    reader: BlockReader, ids: Int[Tensor, "b t"], size: int, random: torch.Generator, *, towards_text: bool
) -> Int[Tensor, "b B m n"]:
    """Return the states y_0, ..., y_n of every block, y_0 being tokens drawn from the text before it.

    Args:
        towards_text: end in the text, and not in the model's own greedy continuation.
    """
    roots, answers = block_roots(ids.shape[1], size), answers_of(ids, size)
    drawn = torch.rand(answers.shape, generator=random) * (roots.unsqueeze(-1) + 1)
    guesses = ids.gather(1, drawn.long().flatten(1).to(ids.device)).view(answers.shape)
    found = [guesses]
    for _ in range(size):
        states = reader.states(ids, guesses)
        rows = torch.cat([states.text[:, roots].unsqueeze(2), states.guesses[:, :, :-1]], 2)
        likeliest = reader.likeliest(rows)
        if towards_text:
            right = (guesses == answers).cumprod(-1).bool()
            known = torch.cat([torch.ones_like(right[..., :1]), right[..., :-1]], -1)
            likeliest = answers.where(known, likeliest)
        guesses = likeliest
        found.append(guesses)
    return torch.stack(found, 2)


@dataclass(frozen=True)
class Convergence:
    """How blocks come to their ends, as means over blocks.

    Args:
        passes: until a block is what it stays.
        fast_forwarded: tokens beyond one for each pass; those that were right by luck at the start are among them.
        stationary: tokens that were right for good at some pass, before one in front of them was.
        blocks: of how many.
    """

    passes: float
    fast_forwarded: float
    stationary: float
    blocks: int

    def __str__(self) -> str:
        return (
            f"{self.passes:.2f} passes for a block, {self.fast_forwarded:.2f} tokens fast-forwarded, "
            f"{self.stationary:.2f} stationary"
        )


def convergence(states: Int[Tensor, "b B m n"], counts: Bool[Tensor, "b B"]) -> Convergence:
    """Return how blocks came to their last states.

    Args:
        states: y_0, ..., y_n.
        counts: which blocks count.
    """
    right = (states == states[:, :, -1:])[counts]
    there = right.all(-1)
    passes = (~there).sum(-1)  # once a block is its last state, it stays so
    for_good = right.flip(1).cumprod(1).flip(1).bool()
    wrong_before = ~right.cumprod(-1).bool()
    stationary = (for_good & wrong_before).any(1).sum(-1)
    size, blocks = states.shape[-1], len(right)
    own = [float(one.float().mean()) if blocks else 0.0 for one in (passes, size - passes.clamp_min(1), stationary)]
    return Convergence(own[0], own[1], own[2], blocks)


class TextsWithBlocks(Dataset[dict[str, Tensor]]):
    """The rows of shards with the trajectories of their blocks, as `{..., "guesses": Int["B n n"]}`."""

    def __init__(self, shards: Shards, files: Sequence[Path]) -> None:
        self.shards, self.guesses = shards, [one for file in files for one in _read(file)]

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.shards[index], GUESSES: self.guesses[index].long()}


def _read(file: Path) -> Int[Tensor, "b B n n"]:
    with safe_open(str(file), framework="pt") as opened:
        return opened.get_tensor(GUESSES)


def write_trajectories(
    reader: BlockReader,
    shards: Sequence[Path],
    folder: Path,
    size: int,
    seed: int,
) -> list[Path]:
    """Write the trajectories towards the texts of shards, but for their last states, a file for each shard.

    A file is there as a whole or not at all, and has random numbers of its own: a run that was interrupted goes on with
    the shard that it did not finish, and writes what one run would have written.

    Args:
        folder: where to; of one model and one size of blocks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = list[Path]()
    for path in tqdm(shards, "trajectories", unit="shard"):
        file = folder / f"{path.stem}.{GUESSES}.safetensors"
        if not file.is_file():
            name = int.from_bytes(hashlib.sha256(path.stem.encode()).digest()[:4], "little")
            (random,) = Noise.from_seed(seed + name, 1).generators
            with safe_open(str(path), framework="pt") as opened:
                ids = opened.get_tensor("ids").long()
            made = list[Tensor]()
            for part in ids.split(TEXTS):
                own = part.to(reader.network.device)
                made.append(jacobi_states(reader, own, size, random, towards_text=True)[:, :, :-1].int().cpu())
            beside = file.with_suffix(".part")
            save_file({GUESSES: torch.cat(made)}, beside)
            os.replace(beside, file)
        found.append(file)
    return found
