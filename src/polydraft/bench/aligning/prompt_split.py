"""Prompts split three ways: to learn from, to choose by, and to judge by."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.bench.prompts import Prompt
from polydraft.bench.prompts.prompt import tokens_of
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, Pair
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_worth import TOGETHER
from polydraft.training.alignment.own_text import own_texts

EXCERPT_TOKENS = 64
FEWEST = 3
BEGINNINGS, BEGINNING = 64, 24
"""How many texts of its own a target begins where no prompts are given, and of how many tokens."""


@dataclass(frozen=True, eq=False)
class PromptSplit:
    """Prompts by what they are for; no prompt is in two parts.

    Args:
        written: tokens of prompts that the target writes behind, to learn from and to choose by.
        choose: of how many of these the texts are held out, to choose by.
        judge: prompts to judge by.
        left_out: how many are too long.
    """

    written: tuple[Int[Tensor, " _"], ...]
    choose: int
    judge: tuple[Prompt, ...]
    left_out: int = 0

    @property
    def learnt(self) -> int:
        """How many prompts are learnt from."""
        return len(self.written) - self.choose

    @property
    def digest(self) -> str:
        """What tells it from other prompts."""
        told = [[one.tolist() for one in self.written], self.judge]
        return sha256(repr(told).encode()).hexdigest()[:16]


EncodedPrompt = tuple[Prompt, Int[Tensor, " _"]]


def different(tokenizer: Any, prompts: Sequence[Prompt], longest: int) -> tuple[list[EncodedPrompt], int]:
    """Return the prompts that differ with their tokens, and how many were too long or empty.

    Args:
        longest: how many tokens a prompt may have.

    Raises:
        InvalidParameter: fewer than three are left.
    """
    encoded = [(one, tokens_of(tokenizer, one, EXCERPT_TOKENS)[0]) for one in prompts]
    fitting = [one for one in encoded if 0 < len(one[1]) <= longest]
    unlike = list({tuple(ids.tolist()): (one, ids) for one, ids in fitting}.values())
    if len(unlike) < FEWEST:
        long = len(prompts) - len(fitting)
        same = f" that fit; {long} of {len(prompts)} are empty or longer than {longest} tokens" if long else ""
        raise InvalidParameter(
            f"An alignment needs {FEWEST} different prompts or more, to learn from, to choose by and to judge by, but "
            f"--prompts has {len(unlike)}{same}; give more of them."
        )
    return unlike, len(prompts) - len(fitting)


def split(pair: Pair, prompts: Sequence[Prompt], longest: int, seed: int) -> PromptSplit:
    """Split prompts at random: a quarter to judge by, an eighth to choose by, the others to learn from.

    Args:
        longest: how many tokens a prompt may have.

    Raises:
        InvalidParameter: fewer than three are short enough.
    """
    unlike, left_out = different(pair.tokenizer, prompts, longest)
    order = np.random.default_rng(seed).permutation(len(unlike)).tolist()
    judge, choose = max(1, len(unlike) // 4), max(1, len(unlike) // 8)
    parts = [unlike[place] for place in order]
    return PromptSplit(
        tuple(ids for _, ids in parts[judge:]),
        choose,
        tuple(one for one, _ in parts[:judge]),
        left_out,
    )


def own_beginnings(pair: Pair, seed: int, ends: Sequence[int]) -> list[Prompt]:
    """Let a target begin texts of its own, to stand for prompts where none are given.

    Raises:
        InvalidParameter: its tokenizer names no token that texts begin with.
    """
    tokenizer = pair.tokenizer
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(begin, int):
        raise InvalidParameter("The target's tokenizer names no token that texts begin with: give --prompts.")
    target, found = HuggingFaceModel(pair.target), list[str]()
    for first in range(0, BEGINNINGS, TOGETHER):
        begun = [torch.tensor([begin])] * TOGETHER
        texts = own_texts(target, begun, SamplingParams(temperature=1.0), BEGINNING, ends, seed + first)
        for row, count in zip(texts.tokens, texts.written.tolist(), strict=True):
            found.append(str(tokenizer.decode(row[1 : 1 + count], skip_special_tokens=True)))
    texts = [one for one in dict.fromkeys(found) if one.strip()]
    return [Prompt(f"beginning {number}", "own", text) for number, text in enumerate(texts)]
