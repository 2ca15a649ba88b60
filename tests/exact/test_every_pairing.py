"""Every verifier with every scheme: refused by name when it is built, or exact by enumeration on chains and trees."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from growing import DeepWorld, among, every_growth, target_rows, written
from torch import Tensor

import polydraft.drafters as drafters
import polydraft.schemes as schemes
import polydraft.verifiers as verifiers
from polydraft.catalogue import RuleLine, every_scheme, tables
from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID, Coupled, Product, Scheme, TopK, TopThenIID, WithoutReplacement
from polydraft.trees import Chain, Draft, TreePolicy, Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    NaiveMatch,
    NodeVerifier,
    PathVerifier,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SharedNoise,
    TopDown,
    TreeVerifier,
    most_drafts,
)
from polydraft.verifiers.trees.shared_noise import times_of

SCHEMES: list[Scheme] = [*every_scheme(), TopThenIID(0), TopThenIID(2)]
LINES = [line for line in tables.RULES if "scheme" in {one.name for one in fields(line.usual)}]
"""The rules that are made for a scheme; `ByShape` is made of two rules."""


def made(line: RuleLine, scheme: Scheme) -> Any:
    """Make a line's rule for any scheme, also for one that the line does not name."""
    return line.make(scheme=scheme)


def builders() -> dict[str, Callable[[Scheme], TreeVerifier]]:
    """Return every lossless rule whose law on trees is known, as it verifies them, and some that are made of two."""
    found: dict[str, Callable[[Scheme], TreeVerifier]] = {}
    for line in (one for one in LINES if one.usual.lossless):
        name = line.usual.name
        if isinstance(line.usual, PathVerifier):
            found[name] = lambda scheme, line=line: made(line, scheme)
        if isinstance(line.usual, NodeVerifier):
            found[f"{name}, top down"] = lambda scheme, line=line: TopDown(made(line, scheme))
        if isinstance(line.usual, ScalableVerifier):
            found[f"{name}, bottom up"] = lambda scheme, line=line: BottomUp(made(line, scheme))
    return {
        **found,
        "ByShape, block or naive match": lambda scheme: ByShape(BlockVerification(scheme), TopDown(NaiveMatch(scheme))),
        "ByShape, naive match or bottom up": lambda scheme: ByShape(
            TopDown(NaiveMatch(scheme)), BottomUp(NaiveMatch(scheme))
        ),
    }


BUILDERS = builders()
SHAPES: list[TreePolicy] = [Chain(3), Widths((2, 1)), Widths((1, 2)), Widths((3,))]
WORLDS = ((5, False), (3, True))


def world_of(scheme: Scheme, seed: int, zeros: bool) -> DeepWorld:
    return DeepWorld.random(seed, 2 if isinstance(scheme, Product) else 0, zeros)


@cache
def grown(scheme: Scheme, policy: TreePolicy, seed: int, zeros: bool) -> tuple[Draft, Tensor]:
    return every_growth(world_of(scheme, seed, zeros), scheme, policy)


def built(make: Callable[[Scheme], TreeVerifier], scheme: Scheme) -> TreeVerifier | None:
    """Build a verifier; a refusal must say which scheme it is about."""
    try:
        return make(scheme)
    except UnpairedScheme as refusal:
        assert scheme.name in str(refusal)
        return None


PAIRS = [(name, scheme) for name, scheme in product(BUILDERS, SCHEMES) if built(BUILDERS[name], scheme) is not None]


@pytest.mark.parametrize(("name", "scheme"), PAIRS, ids=lambda one: getattr(one, "name", one))
def test_what_is_built_is_exact(name: str, scheme: Scheme) -> None:
    verifier = BUILDERS[name](scheme)
    assert isinstance(verifier, PathVerifier) and verifier.lossless
    accepted = 0.0
    for policy, (seed, zeros) in product(SHAPES, WORLDS):
        if policy.shape.max_children > most_drafts(NaiveMatch(scheme)):
            continue
        world, (draft, chance) = world_of(scheme, seed, zeros), grown(scheme, policy, seed, zeros)
        try:
            joint, mean = written(world, verifier, draft, chance)
        except UnpairedScheme as refusal:
            assert policy != SHAPES[0] and "chain" in str(refusal)
            continue
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
        accepted += mean
    assert accepted > 0.1


def unknown(line: RuleLine) -> list[Scheme]:
    """Return the schemes that a line does not name, in any parameters; `TopThenIID(0)` is another name of iid."""
    named = {type(one) for one in line.known}
    return [scheme for scheme in SCHEMES if type(scheme) not in named and scheme != TopThenIID(0)]


@pytest.mark.parametrize(
    ("line", "scheme"),
    [(line, scheme) for line in LINES for scheme in unknown(line)],
    ids=lambda one: getattr(one, "word", getattr(one, "name", one)),
)
def test_what_a_line_does_not_name_is_refused_by_name(line: RuleLine, scheme: Scheme) -> None:
    with pytest.raises(UnpairedScheme, match=re.escape(scheme.name)):
        made(line, scheme)


def test_every_line_has_the_schemes_it_names_and_the_classes_own_first() -> None:
    for line in LINES:
        assert line.known[0] == line.make().scheme and len({*line.known}) == len(line.known)
        assert [line.of(scheme).scheme for scheme in line.known] == [*line.known]
        for scheme in unknown(line)[:1]:
            with pytest.raises(UnpairedScheme, match=re.escape(scheme.name)):
                line.of(scheme)


def test_paths_from_below_are_not_verified_where_drafts_share_their_noise() -> None:
    with pytest.raises(UnpairedScheme, match=Coupled().name):
        BottomUp(NaiveMatch(Coupled()))


def test_block_verification_of_certain_drafts_would_accept_everything() -> None:
    """What the refusal is for: with the top token's probability as if it had been drawn, the text is the draft's."""
    world = world_of(TopK(), 5, False)
    draft, chance = grown(TopK(), Chain(3), 5, False)
    assert float((written(world, BlockVerification(), draft, chance)[0] - world.joint).abs().sum() / 2) > 0.1


# --- Drafts that share their noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SHAPES, ids=str)
def test_naive_match_is_exact_for_every_single_tree(policy: TreePolicy) -> None:
    """Not only on average: so drafts may depend on each other, on earlier steps and on the text as they like."""
    rule = TopDown(NaiveMatch(Coupled()))
    for seed, zeros in WORLDS:
        world, (draft, _) = world_of(Coupled(), seed, zeros), grown(Coupled(), policy, seed, zeros)
        for row in range(len(draft.atoms)):
            joint, _ = written(world, rule, among(draft, [row]), torch.ones(1).double())
            torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-12)


def test_other_rules_are_exact_on_average_only() -> None:
    """The test above would prove nothing if every rule passed it."""
    world, (draft, _) = world_of(IID(), 5, False), grown(WithoutReplacement(), Widths((2, 1)), 5, False)
    rule = TopDown(RecursiveRejectionWithoutReplacement())
    off = [written(world, rule, among(draft, [row]), torch.ones(1).double())[0] - world.joint for row in range(5)]
    assert float(torch.stack(off).abs().amax()) > 0.01


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_shared_noise_writes_what_it_would_without_drafts(scheme: Scheme) -> None:
    """The text is a function of the noise and the target, whatever drafts there are: exact for any scheme."""
    world, rows = world_of(scheme, 5, False), 300
    noise = Noise.from_seed(1, rows).at(0)
    root = torch.zeros(rows, dtype=torch.int64)
    draft = grow(root, Widths((2, 2)), scheme, world.propose, noise)
    verdict = SharedNoise(scheme).verify(draft, target_rows(world, draft), noise)
    emitted, text = verdict.tokens(draft.tree), root.new_zeros(rows, 0)
    for depth in range(emitted.shape[-1]):
        rates = world.target[depth][tuple(text.T)].expand(rows, -1)
        token = (rates / times_of(rates, depth, noise)).argmax(dim=-1)
        text = torch.cat([text, token.unsqueeze(-1)], dim=-1)
    assert torch.equal(emitted, text.where(emitted >= 0, -1))
    assert 0 < int(verdict.length.sum()) < 2 * rows


# --- Nothing is left out ---------------------------------------------------------------------------------------------


def exported(room: object, *parts: str) -> set[type]:
    """Return the exported classes that have these parts, but for protocols."""
    kinds = (getattr(room, name) for name in room.__all__)
    return {
        one
        for one in kinds
        if isinstance(one, type) and not getattr(one, "_is_protocol", False) and {*parts} <= {*dir(one)}
    }


def test_every_exported_scheme_rule_and_drafter_has_a_line() -> None:
    assert exported(schemes, "sample", "probability") == {type(scheme) for scheme in every_scheme()}
    of_lines = {line.word: type(line.usual) for line in tables.RULES}
    at_nodes = {of_lines[line.word] for line in tables.RULES if line.decides_at_nodes}
    assert exported(verifiers, "law", "lossless") <= at_nodes
    assert exported(verifiers, "verify", "lossless") <= {*of_lines.values(), TopDown, BottomUp} - at_nodes
    by_folder = {
        drafters.AdapterDrafter,
        drafters.BoostedDrafter,
        drafters.HeadDrafter,
        drafters.JacobiBlockDrafter,
        drafters.ParallelDrafter,
        drafters.SpecDrafter,
        drafters.RiderDrafter,
    }
    named = {line.kind for line in tables.DRAFTERS} | by_folder
    by_argument = {
        drafters.PredictedDrafter,
        drafters.TextDrafter,
        drafters.NestedDrafter,
        drafters.ByDepthDrafter,
        drafters.SelfDrafter,
        drafters.SkippingDrafter,
    }  # `prediction=`, and what text drafters derive from
    assert exported(drafters, "draft", "commit") - by_argument <= named
