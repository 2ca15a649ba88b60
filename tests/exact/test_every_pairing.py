"""Every verifier with every scheme: refused by name when it is built, or exact by enumeration on chains and trees."""

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from growing import DeepWorld, among, every_growth, target_rows, written
from torch import Tensor

import polydraft.schemes as schemes
import polydraft.verifiers as verifiers
from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import (
    EVERY_SCHEME,
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import Chain, Draft, TreePolicy, Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    ImportanceWeighted,
    KSeq,
    Lenient,
    NaiveMatch,
    NodeVerifier,
    Optimal,
    PathVerifier,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    SpecHubRule,
    SpeculativeSampling,
    TopBeta,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    TreeVerifier,
    TypicalAcceptance,
)
from polydraft.verifiers.trees.shared_noise import first_to_ring

SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    ConditionalPoisson(),
    TopThenSample(),
    *(TopThenIID(top) for top in (0, 1, 2)),
    SpecHub(),
    Product(),
    TopK(),
    Given(),
    Coupled(),
]
NODE_RULES: list[type[NodeVerifier]] = [
    NaiveMatch,
    SpeculativeSampling,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TopThenSampleRule,
    SpecHubRule,
    KSeq,
    ImportanceWeighted,
    Race,
    Optimal,
]
LOSSY: list[type[NodeVerifier]] = [Lenient, TopBeta, TypicalAcceptance]
BUILDERS: dict[str, Callable[[Scheme], TreeVerifier]] = {
    **{
        f"{lift.__name__} {rule.__name__}": lambda s, lift=lift, rule=rule: lift(rule(s))
        for lift in (TopDown, BottomUp)
        for rule in NODE_RULES
    },
    "BlockVerification": BlockVerification,
    "TraversalVerification": TraversalVerification,
    "ByShape, block or naive match": lambda scheme: ByShape(BlockVerification(scheme), TopDown(NaiveMatch(scheme))),
    "ByShape, naive match or bottom up": lambda scheme: ByShape(
        TopDown(NaiveMatch(scheme)), BottomUp(NaiveMatch(scheme))
    ),
}
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
        if isinstance(scheme, SpecHub) and policy.shape.max_children > 2:
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


REFUSED = [
    *((BlockVerification, scheme) for scheme in (TopK(), Given(), TopThenIID(1), TopThenIID(2), Coupled())),
    (lambda scheme: BottomUp(NaiveMatch(scheme)), Coupled()),
    *((rule, Coupled()) for rule in (*NODE_RULES[1:], TraversalVerification)),
]


@pytest.mark.parametrize(("make", "scheme"), REFUSED)
def test_what_is_not_exact_is_refused_by_name(make: Callable[[Scheme], object], scheme: Scheme) -> None:
    with pytest.raises(UnpairedScheme, match=scheme.name):
        make(scheme)


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
        token = first_to_ring(world.target[depth][tuple(text.T)].expand(rows, -1), depth, noise)
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


def test_every_scheme_and_every_rule_is_among_the_cases() -> None:
    assert exported(schemes, "sample", "probability") == {type(scheme) for scheme in SCHEMES}
    assert {type(scheme) for scheme in EVERY_SCHEME} == {type(scheme) for scheme in SCHEMES}
    assert exported(verifiers, "law", "lossless") == {*NODE_RULES, *LOSSY}
    named = {BlockVerification, TraversalVerification, ByShape, TopDown, BottomUp, SharedNoise}
    assert exported(verifiers, "verify", "lossless") == named
