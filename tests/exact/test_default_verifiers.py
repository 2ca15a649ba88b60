"""Every verifier that is taken by default is exact with every dynamic policy, each tree being verified alone."""

from functools import cache
from itertools import product

import pytest
import torch
from doubles import tiny_model
from growing import DeepWorld, Silence, every_growth, written_alone
from heads import adapter_drafter, every_head
from sources import encoder_decoder
from torch import Tensor

import polydraft.drafters as drafters
import polydraft.trees.growing as dynamic
from polydraft.drafters import Drafter, EnsembleDrafter, LookupFirst, ModelDrafter, NgramDrafter, NoDraft
from polydraft.engine.choices import default_verifier
from polydraft.errors import UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.schemes import IID, ConditionalPoisson, Given, Product, Scheme, SpecHub, TopK, WithoutReplacement
from polydraft.trees import (
    AdaptiveThreshold,
    BestFirst,
    Chain,
    Classifier,
    Confident,
    Draft,
    Eagle2,
    EntropyBound,
    ExpectedAcceptance,
    GrowingPolicy,
    Merged,
    PathProbability,
    TokenProbability,
    TreePolicy,
    Widths,
    grow,
)
from polydraft.trees.growing import Confidence
from polydraft.verifiers import (
    BlockVerification,
    ByShape,
    NaiveMatch,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
)

LATE = (1, 1, 2)
"""A chain that branches at its end, if it gets there: whether it does is up to the tokens on the way."""
CONFIDENCES: dict[Confidence, tuple[float, ...]] = {
    TokenProbability(): (0.1, 0.3, 0.6),
    PathProbability(): (0.05, 0.2),
    EntropyBound(0.2): (0.538, 0.6),
    Classifier((4.0, 1.0, -0.5, -0.3), -1.0): (0.5,),
}
POLICIES: list[GrowingPolicy] = [
    *(Confident(LATE, least, guess) for guess, thresholds in CONFIDENCES.items() for least in thresholds),
    Confident((1, 2, 1), 0.3),
    Confident((2, 1), 0.4),
    AdaptiveThreshold(3, 0.4),
    BestFirst(drafts=3, depth=3, children=1),
    BestFirst(drafts=3, depth=3, children=2, beam=1),
    BestFirst(drafts=4, depth=2, children=3, beam=2),
    ExpectedAcceptance(drafts=5, depth=3, children=3, least=0.03),
    Merged((1, 1)),
    Merged((2, 1)),
    Eagle2(2, 3, 3),
    Eagle2(1, 3, 3),
    Eagle2(3, 2, 4),
]
VERIFIERS: list[PathVerifier] = [
    TopDown(NaiveMatch(Given())),
    TopDown(NaiveMatch(TopK())),
    TopDown(NaiveMatch(IID())),
    TopDown(NaiveMatch(Product())),
    TopDown(RecursiveRejection(Product())),
    ByShape(),
    TraversalVerification(),
    Valued(),
    Valued(IID()),
    ByShape(BlockVerification(IID()), TopDown(RecursiveRejection())),
    ByShape(BlockVerification(WithoutReplacement()), TopDown(RecursiveRejectionWithoutReplacement())),
    ByShape(BlockVerification(ConditionalPoisson()), TopDown(NaiveMatch(ConditionalPoisson()))),
    ByShape(BlockVerification(SpecHub()), TopDown(SpecHubRule())),
    ByShape(BlockVerification(Product()), TopDown(RecursiveRejection(Product()))),
    *(
        ByShape(BlockVerification(one), TopDown(Optimal(one)))
        for one in (IID(), WithoutReplacement(), ConditionalPoisson())
    ),
]
WORLDS = ((5, False), (2, True))


def fits(policy: TreePolicy, scheme: Scheme) -> bool:
    try:
        policy.check(scheme)
    except UnpairedScheme:
        return False
    return not (isinstance(scheme, SpecHub) and policy.shape.max_children > 2)


def named(value: object) -> str:
    return f"{value.name} {value.scheme.name}" if isinstance(value, PathVerifier) else str(value)


def world_of(scheme: Scheme, seed: int, zeros: bool) -> DeepWorld:
    return DeepWorld.random(seed, 2 if isinstance(scheme, Product) else 0, zeros)


@cache
def grown(policy: GrowingPolicy, scheme: Scheme, seed: int, zeros: bool) -> tuple[Draft, Tensor]:
    return every_growth(world_of(scheme, seed, zeros), scheme, policy)


PAIRS = [(policy, rule) for policy, rule in product(POLICIES, VERIFIERS) if fits(policy, rule.scheme)]


@pytest.mark.parametrize(("policy", "verifier"), PAIRS, ids=named)
def test_four_tokens_follow_the_target(policy: GrowingPolicy, verifier: PathVerifier) -> None:
    accepted = 0.0
    for seed, zeros in WORLDS:
        world = world_of(verifier.scheme, seed, zeros)
        draft, chance = grown(policy, verifier.scheme, seed, zeros)
        assert draft.most_children == policy.shape.max_children
        joint, mean = written_alone(world, verifier, draft, chance)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
        accepted += mean
    assert accepted > 0.1


@pytest.mark.parametrize("confidence", CONFIDENCES, ids=str)
def test_the_tokens_decide_where_late_branches_are(confidence: Confidence) -> None:
    """The cases above would prove nothing if every tree branched, or none did."""
    widths = set()
    for least, (seed, zeros) in product(CONFIDENCES[confidence], WORLDS):
        draft, _ = grown(Confident(LATE, least, confidence), ByShape().scheme, seed, zeros)
        widths |= {int(width) for width in (draft.tree.children >= 0).sum(dim=-1).amax(dim=-1)}
    assert widths == {1, 2}


def test_a_rule_chosen_by_the_grown_shape_is_biased() -> None:
    """The hypothesis that the rule is chosen before the first draw cannot be spared."""
    world, policy = world_of(IID(), 5, False), Confident(LATE, 0.3)
    draft, chance = grown(policy, ByShape().scheme, 5, False)
    assert float((written_alone(world, ByGrownShape(), draft, chance)[0] - world.joint).abs().sum() / 2) > 1e-3


class ByGrownShape(ByShape):
    """Looks at the tree, as it must not."""

    def rule_for(self, draft: Draft) -> PathVerifier:
        return self.chain if draft.tree.topology.width == 1 else self.tree


# --- Nothing is left out ---------------------------------------------------------------------------------------------


def is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def exported(room: object, *verbs: str) -> set[type]:
    """Return the exported classes that have these verbs, but for protocols."""
    kinds = (getattr(room, name) for name in room.__all__)
    return {one for one in kinds if isinstance(one, type) and not is_protocol(one) and {*verbs} <= {*dir(one)}}


def test_every_dynamic_policy_and_every_confidence_is_among_the_cases() -> None:
    policies = exported(dynamic, "opened", "counts") - {GrowingPolicy}
    assert policies and policies == {type(policy) for policy in POLICIES}
    confidences = exported(dynamic, "of")
    assert confidences and confidences <= {type(guess) for guess in CONFIDENCES}
    schemes = {type(policy): 0 for policy in POLICIES} | {type(policy): 1 for policy, _ in PAIRS}
    assert all(schemes.values()), "a policy without any scheme"


def test_every_default_verifier_is_among_the_cases() -> None:
    model = HuggingFaceModel(tiny_model("llama"))
    every: list[Drafter] = [
        NoDraft(),
        NgramDrafter(),
        ModelDrafter(model),
        EnsembleDrafter(((model, None),)),
        drafters.BoostedDrafter([model, model]),
        LookupFirst(ModelDrafter(model)),
        drafters.SelfDrafter(drafters.View(keys=drafters.Recent())),
        drafters.SkippingDrafter(),
        adapter_drafter(),
        drafters.NestedDrafter(model, ModelDrafter(model), BlockVerification(), Chain(2)),
        drafters.ByDepthDrafter((ModelDrafter(model), NgramDrafter()), (2, 2)),
        drafters.JacobiDrafter(),
        drafters.JacobiBlockDrafter(model),
        drafters.LookaheadDrafter(),
        drafters.OuroborosDrafter(model),
        drafters.ParallelDrafter(model, 1),
        drafters.PredictedDrafter([1]),
        drafters.RiderDrafter((1, 2)),
        drafters.SpecDrafter(HuggingFaceModel(encoder_decoder("t5", vocab_size=6)), 5, 2),
        drafters.RecyclingDrafter(),
        drafters.SuffixDrafter(),
        drafters.route(),
        drafters.route_first(ModelDrafter(model)),
        drafters.merge(),
        drafters.merge_beside(ModelDrafter(model)),
        *every_head().values(),
    ]
    like_suffixes = {drafters.RetrievalDrafter, drafters.TextDrafter}  # the one needs a store, the other is no member
    assert exported(drafters, "draft", "commit", "check") - like_suffixes == {type(one) for one in every}
    found = [default_verifier(one, SamplingParams(temperature=warmth)) for one in every for warmth in (0.0, 0.7, 1.0)]
    assert all(one in VERIFIERS for one in found), found
    assert ByShape() in found


# --- What was fixed before the first draw ----------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "most"), [(Chain(3), 1), (Widths((2, 1)), 2), (Confident(LATE, 0.9), 2)], ids=str)
def test_a_draft_says_what_its_nodes_could_have_had(policy: TreePolicy, most: int) -> None:
    world = DeepWorld.random(5)
    draft = every_growth(world, IID(), policy)[0]
    assert draft.most_children == most
    chain_rule = ByShape(BlockVerification(), TopDown(RecursiveRejection()))
    assert chain_rule.rule_for(draft) is (chain_rule.chain if most == 1 else chain_rule.tree)


def test_an_unknown_bound_is_met_by_the_rule_for_trees() -> None:
    rule, root = ByShape(), torch.zeros(1, dtype=torch.int64)
    nothing = Draft.nothing(root)
    assert nothing.most_children == 0 and rule.rule_for(nothing) is rule.chain
    bare = Draft(nothing.tree, nothing.atoms, nothing.shortlist, nothing.probs)
    assert bare.most_children is None and rule.rule_for(bare) is rule.tree
    assert isinstance(rule.tree.rule, TopThenSampleRule)
    grown = grow(root, Widths(()), IID(), DeepWorld.random(1).propose, Silence(()))
    assert grown.most_children == 0


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), ConditionalPoisson()], ids=lambda one: one.name)
def test_a_drafter_of_one_scheme_has_the_optimal_rule_for_it(scheme: Scheme) -> None:
    """Where the usual rule draws by another scheme, as that of independent drafts does."""

    class Only(ModelDrafter):
        def check(self, asked: Scheme) -> None:
            if asked != scheme:
                raise UnpairedScheme("Another scheme.")

        def defaults(self, params: SamplingParams) -> drafters.Defaults:
            return drafters.Defaults(scheme, Widths((2, 1)))

    drafter = Only(HuggingFaceModel(tiny_model("llama")))
    assert default_verifier(drafter, SamplingParams()) == ByShape(BlockVerification(scheme), TopDown(Optimal(scheme)))
    assert default_verifier(drafter, SamplingParams(temperature=0)) == TopDown(NaiveMatch(scheme))
    assert default_verifier(ModelDrafter(drafter.model), SamplingParams()) == ByShape()
