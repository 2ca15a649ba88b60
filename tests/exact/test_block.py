"""Exactness of block verification on chains, and that it accepts more than token-wise verification."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from worlds import FastNoise, World, check_by_chi_square, completed, outcome, worlds

from polydraft.errors import InvalidDraft, UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID
from polydraft.trees import Chain, Draft, TokenTree, Widths, grow, topology
from polydraft.verifiers import BlockVerification, BottomUp, SpeculativeSampling, TopDown, expected_accepted
from polydraft.verifiers.trees.block_verification import by_rows
from polydraft.verifiers.trees.lifts import first_success, trials

CHAIN = (1, 1)
INSTANCES = [(seed, 4, 3, 0.0) for seed in range(3)] + [(3, 3, 3, 0.6), (4, 4, 4, 0.15)]


@pytest.mark.parametrize("instance", INSTANCES)
def test_three_tokens_follow_the_target_and_more_are_accepted_than_token_by_token(
    instance: tuple[int, int, int, float],
):
    world = World.random(*instance)
    joint, accepted = outcome(world, BlockVerification(), CHAIN)
    torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-12)
    assert accepted > outcome(world, TopDown(SpeculativeSampling()), CHAIN)[1] + 1e-3


@settings(max_examples=30)
@given(world=worlds())
def test_three_tokens_follow_the_target_whatever_the_rows(world: World):
    joint, accepted = outcome(world, BlockVerification(), CHAIN)
    torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
    assert accepted >= outcome(world, TopDown(SpeculativeSampling()), CHAIN)[1] - 1e-9


def published(target: Tensor, draft: Tensor, tokens: list[int]) -> tuple[list[float], list[Tensor]]:
    """Return h_1 ... h_L and the residuals after 0 ... L drafts as the paper writes them (arXiv 2403.10444)."""
    a, length = 1.0, len(tokens)
    accept, residuals = [], []
    for i in range(length + 1):
        if i:
            a = min(1.0, a * float(target[i - 1, tokens[i - 1]] / draft[i - 1, tokens[i - 1]]))
        left = (a * target[i] - draft[i]).clamp_min(0) if i < length else target[i]
        total = float(left.sum())
        accept.append(a if i == length else total / (total + 1 - a))
        residuals.append(left / total)
    return accept[1:], residuals


def test_the_law_is_the_published_one_on_a_long_chain():
    stream = torch.Generator().manual_seed(0)
    length, size = 6, 5
    target, draft = (torch.rand(length + 1, size, generator=stream, dtype=torch.float64) + 0.05 for _ in range(2))
    target, draft = (law / law.sum(dim=-1, keepdim=True) for law in (target, draft))
    tokens = torch.randint(size, (length,), generator=stream)
    accept, residuals = published(target, draft, tokens.tolist())
    law = BlockVerification().path_law(chain_draft(tokens.unsqueeze(0), draft.unsqueeze(0)), target.unsqueeze(0))
    for kept in range(length, 0, -1):
        longer_failed = float(torch.tensor([1 - chance for chance in accept[kept:]], dtype=torch.float64).prod())
        assert float(law.end[0, kept]) == pytest.approx(longer_failed * accept[kept - 1], abs=1e-12)
    for kept in range(length):
        torch.testing.assert_close(law.rest[0, kept, :size], residuals[kept], rtol=0, atol=1e-12)
    assert float(law.rest[0, length, -1]) == 1


def chain_draft(tokens: Tensor, rows: Tensor, lengths: tuple[int, ...] = ()) -> Draft:
    """Return chains over the whole vocabulary, some of them cut short."""
    batch, length = tokens.shape
    size = rows.shape[-1]
    grown = grow(torch.zeros(batch, dtype=torch.int64), Chain(length), IID(), propose_evenly, Noise.from_seed(0, batch))
    last = torch.tensor(lengths or (length,) * batch).unsqueeze(-1)
    atoms = torch.cat([torch.full((batch, 1), -1), tokens], dim=-1)
    valid = torch.arange(length + 1) <= last
    inner = (torch.arange(length + 1) < last).unsqueeze(-1)
    shortlist = torch.arange(size).expand(batch, length + 1, size).where(inner, -1)
    tree = TokenTree(atoms.clamp_min(0), grown.tree.topology, valid)
    return Draft(tree, atoms.where(valid, -1), shortlist, rows * inner)


def propose_evenly(frontier) -> tuple[Tensor, Tensor]:
    places = (*frontier.tokens.shape, 2)
    return torch.arange(2).expand(places), torch.full(places, 0.5)


def test_a_shorter_chain_among_longer_ones_is_verified_as_if_alone():
    stream = torch.Generator().manual_seed(3)
    target, rows = (torch.rand(3, 5, 4, generator=stream, dtype=torch.float64) + 0.05 for _ in range(2))
    target, rows = (law / law.sum(dim=-1, keepdim=True) for law in (target, rows))
    tokens = torch.randint(4, (3, 4), generator=stream)
    together = BlockVerification().path_law(chain_draft(tokens, rows, (4, 2, 1)), target)
    for row, length in enumerate((4, 2, 1)):
        seen = slice(row, row + 1), slice(length + 1)
        alone = BlockVerification().path_law(chain_draft(tokens[seen[0], :length], rows[seen]), target[seen])
        torch.testing.assert_close(together.end[seen], alone.end, rtol=0, atol=1e-15)
        torch.testing.assert_close(together.rest[seen], alone.rest, rtol=0, atol=1e-15)
        assert not bool(together.end[row, length + 1 :].any())


def test_grown_and_verified_chains_follow_the_target():
    """From drafting to the bonus token, by chi-square with false-alarm rate 1e-6."""
    many, world, noise = 2**13, World.random(5), FastNoise.seeded(1, 2**13)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths(CHAIN), IID(), world.propose, noise)
    verdict = BlockVerification().verify(draft, world.target_rows(draft.tree), noise)
    assert set(verdict.length.tolist()) == {0, 1, 2}
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


def test_longer_chains_gain_more():
    """The gain over token-wise verification grows with the chain; the published gain is about eight per cent."""
    stream = torch.Generator().manual_seed(5)
    many, size, gains = 4000, 6, []
    for length in (1, 2, 5):
        noisy = torch.randn(many, length + 1, size, generator=stream, dtype=torch.float64)
        rows = (noisy + 0.8 * torch.randn(noisy.shape, generator=stream, dtype=torch.float64)).softmax(dim=-1)
        tokens = rows[:, :-1].flatten(0, 1).multinomial(1, generator=stream).view(many, length)
        draft = chain_draft(tokens, rows)
        block, wise = (
            float(expected_accepted(verifier, draft, noisy.softmax(dim=-1)).mean())
            for verifier in (BlockVerification(), TopDown(SpeculativeSampling()))
        )
        gains.append(block / wise)
    assert gains[0] == pytest.approx(1, abs=1e-9)
    assert 1.01 < gains[1] < gains[2] < 1.3


def test_trees_are_refused():
    world = World.random(0)
    noise = Noise.from_seed(0, 1)
    draft = grow(torch.zeros(1, dtype=torch.int64), Widths((2, 1)), IID(), world.propose, noise)
    with pytest.raises(UnpairedScheme, match="the tree has 2"):
        BlockVerification().verify(draft, world.target_rows(draft.tree), noise)


def test_it_is_the_lift_of_speculative_sampling_on_long_chains():
    stream = torch.Generator().manual_seed(7)
    target, rows = (torch.randn(50, 6, 5, generator=stream, dtype=torch.float64).softmax(dim=-1) for _ in range(2))
    tokens = rows[:, :-1].flatten(0, 1).multinomial(1, generator=stream).view(50, 5)
    draft = chain_draft(tokens, rows)
    one, two = (v.path_law(draft, target) for v in (BlockVerification(), BottomUp(SpeculativeSampling())))
    torch.testing.assert_close(one.end, two.end, rtol=0, atol=1e-12)


def test_chains_of_whole_rows_end_where_their_trials_do() -> None:
    """Token by token: chains that are kept, cut and absent, equal rows, certain rows and drafts of no mass."""
    many, size = 600, 7
    stream = torch.Generator().manual_seed(3)
    laws = torch.rand(2, many, 4, size, generator=stream, dtype=torch.float64) ** 3
    laws[1, ::4] = laws[0, ::4]
    laws[1, 1::4, :, 3:] = 0.0
    target, draft_rows = laws / laws.sum(dim=-1, keepdim=True)
    places = torch.multinomial(draft_rows[:, :3].reshape(-1, size), 1, generator=stream).view(many, 3)
    places[1::8, 1] = 6
    tree = TokenTree(
        torch.nn.functional.pad(places, (1, 0)),
        topology(Chain(3).shape, many, places.device),
        torch.ones(many, 4, dtype=torch.bool),
    )
    tree.valid[3::8, 2:] = False
    listed = torch.arange(size).repeat(many, 4, 1)
    listed[:, -1] = -1  # nothing was drafted below a leaf
    draft = Draft(tree, torch.nn.functional.pad(places, (1, 0), value=-1), listed, draft_rows, whole=True)
    for dtype in (torch.float64, torch.float32):
        rows = target.to(dtype)
        each = replace(draft, probs=draft.probs.to(dtype))
        found = by_rows(each, rows, FastNoise.seeded(5, many))
        tried = trials(each, rows, BlockVerification().divide)
        expected = first_success(tried, each, rows, FastNoise.seeded(5, many))
        assert set(found.length.tolist()) == {0, 1, 2, 3}
        assert torch.equal(found.path, expected.path) and torch.equal(found.length, expected.length)
        assert torch.equal(found.next_token, expected.next_token)


def test_chains_of_listed_tokens_end_where_their_trials_do() -> None:
    """Token by token: lists of some tokens in any order, with empty places, chains that are cut, drafts in bfloat16."""
    many, size, most = 800, 7, 5
    stream = torch.Generator().manual_seed(4)
    target = torch.rand(many, 4, size, generator=stream, dtype=torch.float64) ** 3
    target = target / target.sum(dim=-1, keepdim=True)
    listed = torch.rand(many, 4, size, generator=stream).argsort(dim=-1)[..., :most]
    probs = torch.rand(many, 4, most, generator=stream, dtype=torch.float64) ** 2
    probs[::4] = target[::4].gather(-1, listed[::4])
    empty = torch.rand(many, 4, most, generator=stream) < 0.3
    empty[..., 2] = False
    empty[:, -1] = True  # nothing is drafted below the last
    listed, probs = listed.masked_fill(empty, -1), probs.masked_fill(empty, 0)
    probs = probs / probs.sum(dim=-1, keepdim=True).where(~empty.all(dim=-1, keepdim=True), 1)
    places = torch.multinomial(probs[:, :3].reshape(-1, most), 1, generator=stream).view(many, 3)
    tokens = listed[:, :3].gather(-1, places.unsqueeze(-1)).squeeze(-1)
    valid = torch.arange(4) <= torch.tensor([3, 3, 3, 2, 0]).repeat(many // 5).unsqueeze(-1)
    tree = TokenTree(
        torch.nn.functional.pad(tokens, (1, 0)).where(valid, 0), topology(Chain(3).shape, many, places.device), valid
    )
    atoms = torch.nn.functional.pad(places, (1, 0), value=-1).where(valid, -1)
    draft = Draft(tree, atoms, listed, probs)
    below = torch.nn.functional.pad(valid[:, 1:], (0, 1)).unsqueeze(-1)
    bare = replace(draft, shortlist=listed.where(below, -1))  # no lists where chains are cut
    for each, dtype in ((draft, torch.float64), (bare, torch.float64), (draft, torch.float32), (bare, torch.bfloat16)):
        rows, each = target.to(torch.promote_types(dtype, torch.float32)), replace(each, probs=each.probs.to(dtype))
        found = by_rows(each, rows, FastNoise.seeded(6, many))
        tried = trials(each, rows, BlockVerification().divide)
        expected = first_success(tried, each, rows, FastNoise.seeded(6, many))
        assert set(found.length.tolist()) == {0, 1, 2, 3}
        assert torch.equal(found.path, expected.path) and torch.equal(found.length, expected.length)
        assert torch.equal(found.next_token, expected.next_token)


@pytest.mark.parametrize(("field", "value"), [("shortlist", 4), ("shortlist", -2), ("shortlist", 10**12), ("atoms", 4)])
def test_places_outside_the_tables_are_refused(field: str, value: int) -> None:
    """Machine code would read foreign memory there."""
    stream = torch.Generator().manual_seed(3)
    target, rows = (torch.rand(2, 4, 4, generator=stream, dtype=torch.float64).softmax(dim=-1) for _ in range(2))
    draft = chain_draft(torch.randint(4, (2, 3), generator=stream), rows)
    BlockVerification().verify(draft, target, Noise.from_seed(0, 2))
    getattr(draft, field)[1, 2] = value
    with pytest.raises(InvalidDraft, match=r"lists tokens from|do not fit"):
        BlockVerification().verify(draft, target, Noise.from_seed(0, 2))


@pytest.mark.wrong_types
def test_tables_of_other_sizes_are_refused() -> None:
    stream = torch.Generator().manual_seed(3)
    target, rows = (torch.rand(2, 4, 4, generator=stream, dtype=torch.float64).softmax(dim=-1) for _ in range(2))
    draft = chain_draft(torch.randint(4, (2, 3), generator=stream), rows)
    for strange, laws in ((draft, target[:, :3]), (replace(draft, probs=draft.probs[:, :3]), target)):
        with pytest.raises(InvalidDraft, match="4 nodes has lists, rows or target rows for another number"):
            BlockVerification().verify(strange, laws, Noise.from_seed(0, 2))
    with pytest.raises(InvalidDraft, match="do not fit"):
        BlockVerification().verify(replace(draft, probs=draft.probs[..., :3]), target, Noise.from_seed(0, 2))
