"""Small worlds for tree rules: next-token laws of a target and a draft that depend on the path, over four tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised
from polydraft.schemes import Scheme, enumerate_drafts
from polydraft.trees import Draft, Frontier, TokenTree, Topology

VOCABULARY, LISTED = 4, 3
KINDS = ("generic", "zeros", "near", "generic again")


@dataclass(frozen=True, eq=False)
class World:
    """The target's law after 0, 1 and 2 tokens, and the draft's after 0 and 1 on shortlists of three tokens.

    Args:
        name: what is special about it.
        target: "V", "V V" and "V V V"; the last axis is the next token.
        shortlist: "K" and "V K": token ids in no particular order.
        draft: "K" and "V K": probabilities on the shortlists.
    """

    name: str
    target: tuple[Float[Tensor, "..."], ...]
    shortlist: tuple[Int[Tensor, "..."], ...]
    draft: tuple[Float[Tensor, "..."], ...]

    @property
    def joint(self) -> Float[Tensor, "V V V"]:
        """The target's law of three tokens."""
        first, second, third = self.target
        return first.view(-1, 1, 1) * second.unsqueeze(-1) * third

    def propose(self, frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
        """Give the draft laws of a frontier, for `grow`."""
        if frontier.depth:
            return self.shortlist[1][frontier.tokens], self.draft[1][frontier.tokens]
        places = (*frontier.tokens.shape, LISTED)
        return self.shortlist[0].expand(places), self.draft[0].expand(places)

    def rows(self, tree: TokenTree) -> Float[Tensor, "b n V"]:
        """Return the target's row at every node of trees of depth two."""
        above = tree.tokens.gather(-1, tree.parents.clamp_min(0))
        deepest = self.target[2][above, tree.tokens]
        depth = tree.depth.unsqueeze(-1)
        return torch.where(depth == 0, self.target[0], torch.where(depth == 1, self.target[1][tree.tokens], deepest))


def worlds() -> list[World]:
    """Return the worlds: generic ones, one whose target has zeros, one whose draft is close to the target."""
    return [_world(kind, seed) for seed, kind in enumerate(KINDS)]


def _world(kind: str, seed: int) -> World:
    uniforms = Noise.from_seed(seed, 1).uniform(3 * VOCABULARY**3)[0]

    def law(first: int, *shape: int) -> Tensor:
        mass = uniforms[first : first + prod(shape)].view(shape) ** 3 + 0.01
        mass = mass * (mass > 0.05) if kind == "zeros" else mass
        return normalised(mass, torch.full_like(mass, 1 / VOCABULARY))

    v = VOCABULARY
    target = (law(0, v), law(v, v, v), law(v + v * v, v, v, v))
    listed = uniforms[100 : 100 + v + v * v].view(v + 1, v).argsort(dim=-1)[:, :LISTED]
    drafted = law(130, v + 1, v).clamp_min(0.001)[:, :LISTED]
    if kind == "near":
        drafted = 0.2 * drafted + torch.cat([target[0].unsqueeze(0), target[1]]).gather(-1, listed)
    drafted = drafted / drafted.sum(dim=-1, keepdim=True)
    return World(kind, target, (listed[0], listed[1:]), (drafted[0], drafted[1:]))


def every_tree(world: World, scheme: Scheme, widths: tuple[int, int]) -> tuple[Draft, Float[Tensor, "b"]]:
    """List every draft tree with these numbers of children by depth as one batch, and their probabilities."""
    found = list(_trees(world, scheme, widths))
    atoms = torch.tensor([tree for tree, _ in found])
    return _as_draft(world, widths, atoms), torch.tensor([chance for _, chance in found], dtype=torch.float64)


def _trees(world: World, scheme: Scheme, widths: tuple[int, int]) -> Iterator[tuple[list[int], float]]:
    after = [_drafts(scheme, law, widths[1]) for law in world.draft[1]]
    for children, chance in _drafts(scheme, world.draft[0], widths[0]):
        nothing = [((-1,) * widths[1], 1.0)]
        below = [after[int(world.shortlist[0][child])] if child >= 0 else nothing for child in children]
        for leaves in product(*below):
            atoms = [-1, *children, *(atom for drafts, _ in leaves for atom in drafts)]
            yield atoms, chance * prod(share for _, share in leaves)


def _drafts(scheme: Scheme, law: Float[Tensor, " K"], k: int) -> list[tuple[tuple[int, ...], float]]:
    atoms, chance = enumerate_drafts(scheme, law, k)
    return list(zip(map(tuple, atoms.tolist()), chance.tolist(), strict=True))


def _as_draft(world: World, widths: tuple[int, int], atoms: Int[Tensor, "b n"]) -> Draft:
    """Return the trees whose nodes, breadth first, have these places in their parents' shortlists."""
    last = 1 + widths[0]
    parents = torch.tensor([-1, *[0] * widths[0], *(node for node in range(1, last) for _ in range(widths[1]))])
    tokens = torch.zeros_like(atoms)
    tokens[:, 1:last] = world.shortlist[0][atoms[:, 1:last].clamp_min(0)]
    shortlist = torch.full((*atoms.shape, LISTED), -1)
    probs = torch.zeros(shortlist.shape, dtype=torch.float64)
    shortlist[:, 0], probs[:, 0] = world.shortlist[0], world.draft[0]
    shortlist[:, 1:last], probs[:, 1:last] = world.shortlist[1][tokens[:, 1:last]], world.draft[1][tokens[:, 1:last]]
    tokens[:, last:] = shortlist[:, parents[last:]].gather(-1, atoms[:, last:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    valid = (atoms >= 0) | (parents < 0)
    tree = TokenTree(tokens, Topology(parents.repeat(len(atoms), 1)), valid)
    return Draft(tree, atoms, shortlist, probs, most_children=max(widths))
