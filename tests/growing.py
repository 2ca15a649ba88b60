"""Every way in which a tree can grow: small worlds, a scheme that follows a script, and the law of the texts."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Product, Scheme, Uniforms, enumerate_drafts
from polydraft.trees import Draft, Frontier, TokenTree, Topology, TreePolicy, grow
from polydraft.verifiers import PathVerifier

TOKENS, DEPTH = 3, 3


@dataclass(frozen=True)
class DeepWorld:
    """Laws over three tokens: the target's after every path of 0 to 3 tokens, the draft's by depth and last token."""

    target: tuple[Tensor, ...]
    draft: Tensor

    @classmethod
    def random(cls, seed: int, members: int = 0, zeros: bool = False) -> "DeepWorld":
        stream = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            mass = torch.rand(shape, generator=stream, dtype=torch.float64) ** 2 + 0.02
            mass = mass * (mass > 0.1) + 1e-6 if zeros else mass
            mass = mass * (mass > 1e-5) if zeros else mass
            mass[..., 0] += 0.05
            return mass / mass.sum(dim=-1, keepdim=True)

        target = tuple(law(*[TOKENS] * (depth + 1)) for depth in range(DEPTH + 1))
        drafted = law(DEPTH, TOKENS, members, TOKENS) if members else law(DEPTH, TOKENS, TOKENS)
        return cls(target, drafted)

    @property
    def joint(self) -> Tensor:
        """The target's law of four tokens."""
        law = self.target[0]
        for row in self.target[1:]:
            law = law.unsqueeze(-1) * row
        return law

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        law = self.draft[frontier.depth][frontier.tokens]
        return torch.arange(TOKENS).expand(*frontier.tokens.shape, TOKENS), law

    def after(self, tokens: int) -> Tensor:
        """The target's law of the tokens that follow so many, up to four in all; given all four."""
        law = torch.ones([TOKENS] * tokens, dtype=torch.float64)
        for row in self.target[tokens:]:
            law = law.unsqueeze(-1) * row
        return law


@dataclass(frozen=True)
class Silence(Noise):
    """Numbers that nobody looks at, for any number of rows."""

    rows: int = 1

    def at(self, steps: object, lengths: object = None) -> "Silence":
        return self

    def uniform(self, *shape: int) -> Tensor:
        return torch.zeros(self.rows, *shape, dtype=torch.float64)


class Unwritten(BaseException):
    """The script has come to an end: here is what is to be drawn next. No error, at which growth would end."""

    def __init__(self, law: Tensor, counts: Tensor, most: int | None = None) -> None:
        super().__init__()
        self.law, self.counts, self.most = law, counts, int(counts.max()) if most is None else most


@dataclass
class Scripted:
    """A scheme whose drafts at each depth are written down, one way for each row of the batch."""

    inner: Scheme
    script: list[Tensor]
    deterministic: bool
    name = "scripted"
    told: int = 0

    @property
    def independent(self) -> bool:
        return self.inner.independent

    @property
    def lone_draft_is_drawn(self) -> bool:
        return self.inner.lone_draft_is_drawn

    @property
    def several_rows(self) -> bool:
        return self.inner.several_rows

    @property
    def uniforms(self) -> Uniforms:
        return Uniforms.OF_TOKENS  # nobody reads them

    def sample(self, draft_probs: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        if self.told == len(self.script):
            raise Unwritten(draft_probs, counts)
        self.told += 1
        return self.script[self.told - 1]

    def probability(self, draft_probs: Tensor, drafts: Tensor) -> Tensor:
        return self.inner.probability(draft_probs, drafts)


class ScriptedProduct(Product):
    """The same for drafts of several rows, for those who ask for this very scheme."""

    def __init__(self, scripted: Scripted) -> None:
        object.__setattr__(self, "scripted", scripted)

    def sample(self, draft_probs: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        return self.scripted.sample(draft_probs, counts, uniforms, k)


def every_growth(
    world: DeepWorld, scheme: Scheme, policy: TreePolicy, deterministic: bool | None = None
) -> tuple[Draft, Tensor]:
    """List every draft that can be grown, as one batch, and the probability of each.

    All rows grow by a script of drafts; where it ends, every row is continued in all possible ways, as often as each
    of its nodes has drafts. `deterministic` is what the scheme says of itself if that is not to be the truth.
    """
    script: list[Tensor] = []
    chance = torch.ones(1, dtype=torch.float64)
    says = scheme.deterministic if deterministic is None else deterministic
    while True:
        try:
            root = torch.zeros(len(chance), dtype=torch.int64)
            silence = Silence((), rows=len(root))
            scripted = Scripted(scheme, script, says)
            drawn = ScriptedProduct(scripted) if isinstance(scheme, Product) else scripted
            return grow(root, policy, drawn, world.propose, silence), chance
        except Unwritten as end:
            script, chance = continued(scheme, script, chance, end)


def continued(scheme: Scheme, script: list[Tensor], chance: Tensor, end: Unwritten) -> tuple[list[Tensor], Tensor]:
    rows, drafts, shares = [], [], []
    for row, (laws, counts) in enumerate(zip(end.law, end.counts.tolist(), strict=True)):
        each = [_ways(scheme, law, count, end.most) for law, count in zip(laws, counts, strict=True)]
        for ways in product(*each):
            rows.append(row)
            drafts.append([way for way, _ in ways])
            shares.append(prod(share for _, share in ways))
    places = torch.tensor(rows)
    script = [one[places] for one in script] + [torch.tensor(drafts)]
    return script, chance[places] * torch.tensor(shares, dtype=torch.float64)


def _ways(scheme: Scheme, law: Tensor, count: int, most: int) -> list[tuple[list[int], float]]:
    if count == 0:
        return [([-1] * most, 1.0)]
    row = law.tolist()
    key = tuple(map(tuple, row)) if law.dim() == 2 else tuple(row)
    return [([*drafts, *[-1] * (most - count)], share) for drafts, share in _listed(scheme, key, count)]


@cache
def _listed(scheme: Scheme, law: tuple, count: int) -> list[tuple[list[int], float]]:
    drafts, share = enumerate_drafts(scheme, torch.tensor(law, dtype=torch.float64), count)
    return list(zip(drafts.tolist(), share.tolist(), strict=True))


def places_of(draft: Draft) -> Tensor:
    """Return each node's path from the root as a number in base three."""
    tree = draft.tree
    places = torch.zeros_like(tree.tokens)
    rows = torch.arange(len(places))
    for node in range(1, places.shape[-1]):
        places[:, node] = TOKENS * places[rows, tree.parents[:, node]] + tree.tokens[:, node]
    return places


def target_rows(world: DeepWorld, draft: Draft) -> Tensor:
    places, depth = places_of(draft), draft.tree.depth
    rows = torch.full((*places.shape, TOKENS), 1 / TOKENS, dtype=torch.float64)
    for deep, law in enumerate(world.target):
        here = draft.tree.valid & (depth == deep)
        rows[here] = law.reshape(-1, TOKENS)[places[here]]
    return rows


def written(world: DeepWorld, verifier: PathVerifier, draft: Draft, chance: Tensor) -> tuple[Tensor, float]:
    """Return the law of four tokens and the mean number of accepted drafts; after the verdict the target goes on."""
    assert abs(float(chance.sum()) - 1) < 1e-9
    return emitted(world, verifier, draft, chance)


def written_alone(world: DeepWorld, verifier: PathVerifier, draft: Draft, chance: Tensor) -> tuple[Tensor, float]:
    """Do so with every tree verified as if it were alone: among trees of its own shape, without padding.

    In one batch with all others a verifier that looks at the trees' shape would see the widest of all.
    """
    assert abs(float(chance.sum()) - 1) < 1e-9
    shapes: dict[tuple[int, ...], list[int]] = {}
    for row, parents in enumerate(draft.tree.parents.where(draft.tree.valid, -2).tolist()):
        shapes.setdefault(tuple(parents), []).append(row)
    joint, accepted = torch.zeros_like(world.joint), 0.0
    for parents, rows in shapes.items():
        alone = among(draft, rows, parents.index(-2) if -2 in parents else None)
        law, mean = emitted(world, verifier, alone, chance[rows])
        joint, accepted = joint + law, accepted + mean
    return joint, accepted


def among(draft: Draft, rows: list[int], size: int | None = None) -> Draft:
    """Return some rows of a batch, and the first nodes of their trees."""
    tree = draft.tree
    tokens, parents, valid, atoms, shortlist, probs = (
        one[rows, :size] for one in (tree.tokens, tree.parents, tree.valid, draft.atoms, draft.shortlist, draft.probs)
    )
    alone = TokenTree(tokens, Topology(parents), valid)
    return replace(draft, tree=alone, atoms=atoms, shortlist=shortlist, probs=probs, scored=None)


def emitted(world: DeepWorld, verifier: PathVerifier, draft: Draft, chance: Tensor) -> tuple[Tensor, float]:
    rows, places, depth = target_rows(world, draft), places_of(draft), draft.tree.depth
    law = verifier.path_law(draft, rows)
    emitted = law.end.unsqueeze(-1) * law.next_token(draft, rows) * chance.view(-1, 1, 1)
    assert not bool(emitted[~draft.tree.valid].any())
    joint = torch.zeros_like(world.joint)
    for deep in range(len(world.target)):
        here = draft.tree.valid & (depth == deep)
        mass = torch.zeros(TOKENS**deep, TOKENS, dtype=torch.float64).index_add(0, places[here], emitted[here])
        joint += mass.view([TOKENS] * (deep + 1) + [1] * (DEPTH - deep)) * world.after(deep + 1)
    return joint, float(chance @ law.accepted(draft.tree))
