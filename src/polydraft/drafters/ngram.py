"""Prompt lookup: what followed the last time the text ended like this."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.drafters.protocol import Defaults, Drafter, Session
from polydraft.models import LanguageModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Step, Text
from polydraft.schemes import Given, Scheme, require_scheme
from polydraft.trees import Chain, Draft, TokenTree, TreePolicy, topology


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Drafts the continuation of the most recent earlier occurrence of the text's longest matching suffix.

    The drafts form a chain as long as the policy's tree is deep, or shorter where the text ends. No match, no
    drafts. They are deterministic, so naive match is the optimal verifier.

    Args:
        longest: tokens of the longest suffix to look for.
        shortest: tokens of the shortest suffix to look for.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding; LLMA, arXiv 2304.04487.
    """

    longest: int = 3
    shortest: int = 1
    name = "n-gram"
    sound = True

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give chains of eight."""
        return Defaults(Given(), Chain(8))

    def models(self) -> tuple[LanguageModel, ...]:
        """Return none."""
        return ()

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless the scheme is `Given`."""
        require_scheme(scheme, (Given,), "The n-gram drafter")

    def start(self, text: Text, session: Session) -> int:
        """Return the target's number of tokens, beyond which nothing is drafted."""
        return session.vocab_size

    def draft(self, state: int, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> tuple[Draft, int]:
        """Look up every row's continuation; the batch's chain is as long as the longest of them."""
        return given_chain(text, chains_found(text, self.longest, self.shortest, policy.shape.depth, state)), state

    def commit(self, state: int, step: Step) -> int:
        """Keep the state: the next draft reads the text itself."""
        return state

    def join(self, state: int, row: int, other: int) -> int:
        """Keep the state, for the same reason."""
        return state

    def continues(self, state: object) -> bool:
        """Say yes: there is nothing to go on from."""
        return True


def continuation(text: NDArray[np.int64], longest: int, shortest: int, most: int) -> NDArray[np.int64]:
    """Return up to `most` tokens that followed the latest earlier occurrence of the longest repeated suffix.

    Suffixes of `longest` down to `shortest` tokens are tried; an occurrence may overlap the suffix itself.
    """
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        matches = np.flatnonzero((windows == text[-size:]).all(axis=1))
        if len(matches):
            first = int(matches[-1]) + size
            return text[first : first + most]
    return text[:0]


def chains_found(text: Text, longest: int, shortest: int, most: int, vocab_size: int) -> list[NDArray[np.int64]]:
    """Return the `continuation` of every row, up to its first token that the target does not have."""
    rows = zip(text.tokens.cpu().numpy(), text.lengths.tolist(), strict=True)
    found = [continuation(row[:length], longest, shortest, most) for row, length in rows]
    return [_until_beyond(tokens, vocab_size) for tokens in found]


def _until_beyond(tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Cut a continuation before its first token that the target does not have."""
    beyond = np.flatnonzero(tokens >= vocab_size)
    return tokens[: beyond[0]] if len(beyond) else tokens


def given_chain(text: Text, found: list[NDArray[np.int64]]) -> Draft:
    """Build the draft of one given chain per row; rows with shorter chains are padded with invalid nodes."""
    length = max(map(len, found))
    if length == 0:
        return Draft.nothing(text.last())
    batch, device = len(found), text.tokens.device
    drafted = torch.full((batch, length), -1, dtype=torch.int64)
    for row, tokens in enumerate(found):
        drafted[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    drafted = drafted.to(device)
    there = drafted >= 0
    tokens = torch.cat([text.last().unsqueeze(-1), drafted.clamp_min(0)], dim=-1)
    valid = torch.nn.functional.pad(there, (1, 0), value=True)
    atoms = torch.where(valid, 0, -1)
    atoms[:, 0] = -1
    shortlist = torch.nn.functional.pad(drafted, (0, 1), value=-1).unsqueeze(-1)
    tree = TokenTree(tokens, topology(Chain(length).shape, batch, device), valid)
    return Draft(tree, atoms, shortlist, (shortlist >= 0).float(), most_children=1)
