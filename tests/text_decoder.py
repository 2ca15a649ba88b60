"""The target calls of the real decoder on a pair of three tokens, by enumeration of all drafts and verdicts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from growing import TOKENS, every_growth
from torch import Tensor

from polydraft.catalogue import tables
from polydraft.errors import UnpairedScheme
from polydraft.schemes import Scheme, enumerate_drafts
from polydraft.trees import Chain, Draft, Frontier
from polydraft.verifiers import BottomUp, NodeVerifier, PathVerifier, ScalableVerifier, TopDown


@dataclass(frozen=True, eq=False)
class Rooted:
    """A pair behind a token: the target's rows by the last token, the draft's by depth below the root and last token.

    So the draft's row of a place depends on where its step began, as a parallel head's does.
    """

    target: Tensor
    draft: Tensor
    root: int = 0

    @classmethod
    def random(cls, seed: int, depth: int = 4, members: tuple[int, ...] = ()) -> "Rooted":
        stream = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            mass = torch.rand(shape, generator=stream, dtype=torch.float64) ** 2 + 0.03
            return mass / mass.sum(-1, keepdim=True)

        return cls(law(TOKENS, TOKENS), law(depth, TOKENS, *members, TOKENS))

    def at(self, root: int) -> "Rooted":
        return Rooted(self.target, self.draft, root)

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        tokens = frontier.tokens if frontier.depth else torch.full_like(frontier.tokens, self.root)
        return torch.arange(TOKENS).expand(*tokens.shape, TOKENS), self.draft[frontier.depth][tokens]

    def rows(self, draft: Draft) -> Tensor:
        tokens = draft.tree.tokens.clone()
        tokens[:, 0] = self.root
        return self.target[tokens]

    def texts(self, length: int) -> tuple[Tensor, Tensor]:
        """Return all texts behind the root, and the target's law of them."""
        texts = torch.tensor([*product(range(TOKENS), repeat=length)])
        return texts, self.target[self.before(texts), texts].prod(-1)

    def before(self, texts: Tensor) -> Tensor:
        return torch.nn.functional.pad(texts[:, :-1], (1, 0), value=self.root)

    def path_rows(self, texts: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the draft's and the target's rows of the chain below every place, and the tokens; texts are repeated
        behind their ends, where nothing counts."""
        length = texts.shape[1]
        places = (torch.arange(length).unsqueeze(-1) + torch.arange(width)).clamp_max(length - 1)
        tokens, before = texts[:, places], self.before(texts)[:, places]
        return self.draft[torch.arange(width), before], self.target[before], tokens


def step_law(pair: Rooted, verifier: PathVerifier, scheme: Scheme, width: int) -> Tensor:
    """Return how often the decoder's first step keeps so many drafts and ends with that token."""
    draft, chance = every_growth(pair, scheme, Chain(width))  # pyright: ignore[reportArgumentType]  it proposes
    rows = pair.rows(draft)
    law = verifier.path_law(draft, rows)
    mass = law.end.unsqueeze(-1) * law.next_token(draft, rows) * chance.view(-1, 1, 1)
    return torch.stack([mass[draft.tree.valid & (draft.tree.depth == deep)].sum(0) for deep in range(width + 1)])


def enumerated_calls(pair: Rooted, verifier: PathVerifier, scheme: Scheme, width: int, length: int) -> Tensor:
    """Return the mean number of target calls that the decoder takes for so many tokens."""

    @cache
    def from_root(root: int) -> tuple[tuple[int, int, Tensor], ...]:
        """Return (tokens that a step brings, the last of them, how often)."""
        found = step_law(pair.at(root), verifier, scheme, width)
        return tuple((deep + 1, last, found[deep][last]) for deep in range(width + 1) for last in range(TOKENS))

    @cache
    def calls(left: int, root: int) -> Tensor:
        if left <= 0:
            return torch.zeros((), dtype=torch.float64)
        later = [share * calls(left - brought, last) for brought, last, share in from_root(root)]
        return 1 + torch.stack(later).sum()

    return calls(length, pair.root)


def chain_rules(schemes: tuple[Scheme, ...]) -> Iterator[tuple[str, PathVerifier, Scheme, NodeVerifier | None]]:
    """List the catalogue's lossless rules as they verify chains of every scheme; of those that look at one draft after
    the other the node rule, None for block verification."""
    for line in tables.RULES:
        if not line.usual.lossless:
            continue
        for scheme in schemes:
            try:
                rule = line.make(scheme=scheme)
            except (UnpairedScheme, TypeError):
                continue
            if isinstance(rule, PathVerifier):
                yield f"{line.word} {scheme.name}", rule, scheme, None
            if isinstance(rule, NodeVerifier):
                yield f"{line.word} {scheme.name} down", TopDown(rule), scheme, rule
            if isinstance(rule, ScalableVerifier) and scheme.independent:
                # naive match takes the same share of a token however much of it is left: nothing is gained from below
                yield f"{line.word} {scheme.name} up", BottomUp(rule), scheme, rule if line.word == "naive" else None


def share_of_text(rule: NodeVerifier, scheme: Scheme, draft: Tensor, target: Tensor, token: int) -> Tensor:
    """Return t(x) / p(x): how often a token of the target's text is an accepted draft, by enumeration of a node."""
    rows = torch.nn.functional.pad(draft, (0, 1))
    drafts, chance = enumerate_drafts(scheme, draft, 1)
    wide = torch.nn.functional.pad(target, (0, 1)).expand(len(drafts), -1)
    law = rule.law(drafts, rows.expand(len(drafts), *rows.shape), wide)
    return (chance * law.child[:, 0] * (drafts[:, 0] == token)).sum() / target[token]
