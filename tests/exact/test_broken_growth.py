"""An error in the middle of growth ends it: what was drawn is verified, and the text still follows the target.

The errors here depend on drawn tokens. To drop the whole draft then would be pruning after sampling.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

import pytest
import torch
from growing import DeepWorld, Scripted, ScriptedProduct, Silence, Unwritten, among, continued, emitted
from test_default_verifiers import LATE, VERIFIERS, fits, named
from torch import Tensor

from polydraft.errors import UnpairedScheme, VocabularyMismatch
from polydraft.schemes import IID, Product, Scheme, TopK, Uniforms, WithoutReplacement
from polydraft.trees import (
    BestFirst,
    Chain,
    Confident,
    Draft,
    Eagle2,
    Fixed,
    Frontier,
    GrowingPolicy,
    Merged,
    TokenTree,
    Topology,
    TreePolicy,
    TreeShape,
    Widths,
    grow,
)
from polydraft.trees.frontier import distinct
from polydraft.trees.growing import Drawn, Opened
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
)

POLICIES: list[TreePolicy] = [
    Chain(3),
    Widths((2, 1)),
    Confident(LATE, 0.1),
    BestFirst(drafts=3, depth=3, children=2, beam=1),
    Merged((1, 1)),
    Eagle2(2, 2, 3),
]
RULES: list[PathVerifier] = [
    *VERIFIERS,
    BottomUp(TopThenSampleRule()),
    BottomUp(RecursiveRejection(Product())),
    TopDown(RecursiveRejectionWithoutReplacement()),
    TraversalVerification(IID()),
    Valued(IID()),
    Valued(),
    TraversalVerification(WithoutReplacement()),
]
CHAIN_RULES: list[PathVerifier] = [
    BlockVerification(),
    TopDown(SpeculativeSampling()),
    BottomUp(SpeculativeSampling()),
]


class Broken(RuntimeError):
    """What a drafter may raise."""


def unlucky(tokens: Tensor) -> bool:
    """Tell whether some drawn tokens are such that the drafter breaks."""
    return int(tokens.sum()) % 3 == 1


@dataclass(frozen=True)
class Breaking(DeepWorld):
    """A world whose drafter breaks at some tokens below the root."""

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        if frontier.depth and unlucky(frontier.tokens):
            raise Broken(f"at {frontier.tokens.tolist()}")
        return super().propose(frontier)


def rows_where(bad: Tensor, law: Tensor, value: Tensor | float) -> Tensor:
    """Return the rows with others at some nodes."""
    return torch.where(bad.view(*bad.shape, *[1] * (law.dim() - 2)), value, law)


def narrower(bad: Tensor, listed: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    return listed[..., :2], law[..., :2] / law[..., :2].sum(dim=-1, keepdim=True)


def wider(bad: Tensor, listed: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    pad = torch.nn.functional.pad
    return pad(listed, (0, 2), value=-1), pad(law, (0, 2))


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "narrower rows": narrower,
    "wider rows": wider,
    "a token twice": lambda bad, listed, law: (rows_where(bad, listed, torch.tensor([0, 0, 1])), law),
    "a number that is none": lambda bad, listed, law: (listed, rows_where(bad, law, torch.nan)),
    "infinite": lambda bad, listed, law: (listed, rows_where(bad, law, torch.inf)),
    "negative": lambda bad, listed, law: (listed, rows_where(bad, law, torch.tensor([0.8, 0.6, -0.4]).double())),
    "a sum of two": lambda bad, listed, law: (listed, rows_where(bad, law, 2 * law)),
    "no mass": lambda bad, listed, law: (listed, rows_where(bad, law, 0.0)),
    "whole numbers": lambda bad, listed, law: (listed, law.long()),
    "short tokens": lambda bad, listed, law: (listed.int(), law),
    "another device": lambda bad, listed, law: (listed, law.to("meta")),
    "another device for lists": lambda bad, listed, law: (listed.to("meta"), law),
    "other nodes": lambda bad, listed, law: (torch.cat([listed] * 2, dim=1), torch.cat([law] * 2, dim=1)),
    "more rows of a node": lambda bad, listed, law: (
        listed,
        torch.stack([law[:, :, 0] if law.dim() == 4 else law] * 3, 2),
    ),
    "rows without lists": lambda bad, listed, law: law,
    "nothing": lambda bad, listed, law: None,
    "lists of numbers": lambda bad, listed, law: (listed.tolist(), law.tolist()),
}


@dataclass(frozen=True)
class Wrong(DeepWorld):
    """A world whose drafter proposes something wrong below some tokens of one depth, in memory that it uses again."""

    kind: str = ""
    depth: int = 1

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        listed, law = super().propose(frontier)
        bad = (frontier.tokens == 1) & (frontier.depth == self.depth)
        found: object = (listed.contiguous(), law.clone())
        if bool(bad.any()):
            found = WRONG[self.kind](bad, *found)
        self.use_again(found)
        return found

    def use_again(self, found: object) -> None:
        for memory in self.__dict__.setdefault("lent", []):
            memory.fill_(0)
        lent = found if isinstance(found, tuple) else ()
        self.__dict__["lent"] = [one for one in lent if isinstance(one, Tensor) and one.device.type == "cpu"]


def wrong_world(kind: str, depth: int, scheme: Scheme) -> Wrong:
    plain = DeepWorld.random(5, 2 if isinstance(scheme, Product) else 0)
    return Wrong(plain.target, plain.draft, kind, depth)


Wrapped = Callable[[Scheme], Scheme]


def every_one(
    world: DeepWorld, scheme: Scheme, policy: TreePolicy, batch: int = 1, wrapped: Wrapped = lambda scheme: scheme
) -> Iterator[tuple[Draft, float]]:
    """List every draft that can be grown, one batch of `batch` rows after the other, with its probability."""
    waiting: list[tuple[list[Tensor], float]] = [([], 1.0)]
    while waiting:
        script, chance = waiting.pop()
        scripted = Scripted(scheme, script, scheme.deterministic)
        drawn = ScriptedProduct(scripted) if isinstance(scheme, Product) else wrapped(scripted)
        root = torch.zeros(batch, dtype=torch.int64)
        try:
            yield grow(root, policy, drawn, world.propose, Silence((), rows=batch)), chance
        except Unwritten as end:
            ways = [continued(scheme, [], torch.ones(1).double(), row) for row in rows_of(end, batch)]
            for places in product(*(range(len(shares)) for _, shares in ways)):
                drafts = torch.cat([now[place : place + 1] for ([now], _), place in zip(ways, places, strict=True)])
                share = [float(shares[place]) for (_, shares), place in zip(ways, places, strict=True)]
                waiting.append(([*script, drafts], chance * prod(share)))


def rows_of(end: Unwritten, batch: int) -> list[Unwritten]:
    """Return what is to be drawn for each row, all rows with room for as many drafts."""
    return [Unwritten(end.law[row : row + 1], end.counts[row : row + 1], int(end.counts.max())) for row in range(batch)]


def joined(drafts: list[Draft]) -> Draft:
    """Return trees of one shape as one batch."""
    tree = [draft.tree for draft in drafts]
    alone = TokenTree(
        torch.cat([one.tokens for one in tree]),
        Topology(torch.cat([one.parents for one in tree])),
        torch.cat([one.valid for one in tree]),
    )
    parts = {name: torch.cat([getattr(one, name) for one in drafts]) for name in ("atoms", "shortlist", "probs")}
    sound = torch.cat([torch.ones(1, dtype=torch.bool) if one.sound is None else one.sound for one in drafts])
    return replace(drafts[0], tree=alone, scored=None, sound=sound, **parts)


def world_of(scheme: Scheme) -> Breaking:
    return Breaking.random(5, 2 if isinstance(scheme, Product) else 0)


Grown = list[tuple[Draft, Tensor]]


def by_shape(drafts: Iterable[tuple[Draft, float]]) -> Grown:
    """Return all drafts, those of one shape together, and their probabilities."""
    shapes: dict[tuple[object, ...], list[tuple[Draft, float]]] = {}
    for draft, chance in drafts:
        key = (draft.shortlist.shape, draft.tree.parents.shape, *draft.tree.parents[0].tolist())
        shapes.setdefault(key, []).append((draft, chance))
    return [
        (joined([draft for draft, _ in some]), torch.tensor([chance for _, chance in some], dtype=torch.float64))
        for some in shapes.values()
    ]


@cache
def grown(policy: TreePolicy, scheme: Scheme) -> Grown:
    """Return all drafts of a breaking drafter."""
    return by_shape(every_one(world_of(scheme), scheme, policy))


@cache
def grown_wrong(policy: TreePolicy, scheme: Scheme, kind: str, depth: int) -> Grown:
    """Return all drafts of a drafter that proposes something wrong, and check that it does."""
    found = [*every_one(wrong_world(kind, depth, scheme), scheme, policy)]
    wrong = sum(draft.failure is not None or draft.sound is not None for draft, _ in found)
    told = kind not in ("narrower rows", "wider rows") and depth < policy.shape.depth
    seldom = scheme.deterministic or (isinstance(policy, GrowingPolicy) and depth == 2)  # may never come to the token
    assert wrong or not told or seldom, "else nothing was wrong"
    for draft, _ in found:
        assert bool(draft.probs.isfinite().all()) and bool(distinct(draft.shortlist).all())
    return by_shape(found)


def law_of_texts(world: DeepWorld, verifier: PathVerifier, found: Grown) -> Tensor:
    assert float(sum(chance.sum() for _, chance in found)) == pytest.approx(1, abs=1e-12)
    return sum((emitted(world, verifier, draft, chance)[0] for draft, chance in found), torch.zeros(()))


def text(policy: TreePolicy, verifier: PathVerifier) -> Tensor:
    return law_of_texts(world_of(verifier.scheme), verifier, grown(policy, verifier.scheme))


CASES = [
    (policy, rule)
    for policy, rule in product(POLICIES, RULES)
    if not isinstance(policy, GrowingPolicy) or fits(policy, rule.scheme)
]


@pytest.mark.parametrize(("policy", "verifier"), [*CASES, *product(POLICIES[:1], CHAIN_RULES)], ids=named)
def test_four_tokens_follow_the_target(policy: TreePolicy, verifier: PathVerifier) -> None:
    torch.testing.assert_close(text(policy, verifier), world_of(verifier.scheme).joint, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [((3,), (1,)), ((3,), (2, 1))], ids=str)
@pytest.mark.parametrize("verifier", [Valued(IID()), Valued()], ids=lambda rule: rule.scheme.name)
def test_so_they_do_where_siblings_are_looked_at_apart(verifier: PathVerifier, shape: tuple[tuple[int, ...], ...]):
    """Whether a first draft's children were drawn depends on siblings that are looked at after it."""
    law = text(Fixed(TreeShape(shape)), verifier)
    torch.testing.assert_close(law, world_of(verifier.scheme).joint, rtol=0, atol=1e-9)


def check_whatever_is_proposed(policy: TreePolicy, verifier: PathVerifier, kind: str) -> None:
    for depth in (1, 2):
        world = wrong_world(kind, depth, verifier.scheme)
        law = law_of_texts(world, verifier, grown_wrong(policy, verifier.scheme, kind, depth))
        torch.testing.assert_close(law, world.joint, rtol=0, atol=1e-9)


SOME = [case for case in [*CASES, *product(POLICIES[:1], CHAIN_RULES)] if case[0] in POLICIES[:4]][::5]


@pytest.mark.long(40)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("policy", "verifier"), SOME, ids=named)
def test_four_tokens_follow_the_target_whatever_is_proposed(
    policy: TreePolicy, verifier: PathVerifier, kind: str
) -> None:
    """What is wrong follows from the tokens drawn above it; nothing that was drawn may be lost for it."""
    check_whatever_is_proposed(policy, verifier, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "verifier"), [*CASES, *product(POLICIES[:1], CHAIN_RULES)], ids=named)
def test_so_they_do_with_every_rule_and_policy(policy: TreePolicy, verifier: PathVerifier) -> None:
    for kind in WRONG:
        check_whatever_is_proposed(policy, verifier, kind)


@pytest.mark.parametrize("policy", POLICIES[:4], ids=str)
def test_growth_does_end_early_and_late(policy: TreePolicy) -> None:
    """The cases above would prove nothing if the drafter never broke, or always did."""
    sizes = set()
    for draft, _ in every_one(world_of(IID()), IID(), policy):
        assert draft.most_children == policy.shape.max_children
        sizes.add((draft.failure is not None, draft.tree.topology.height))
        check_shape(draft)
    assert {failed for failed, _ in sizes} == {True, False}
    assert len({height for _, height in sizes}) > 1


def check_shape(draft: Draft) -> None:
    """Check that a draft is a tree whose deepest nodes are leaves."""
    tree = draft.tree
    nodes = tree.tokens.shape[-1]
    assert draft.shortlist.shape[:2] == draft.probs.shape[:2] == draft.atoms.shape == (1, nodes)
    assert bool(tree.valid.gather(-1, tree.parents.clamp_min(0))[tree.valid].all())
    for node in range(nodes):
        busy = bool((tree.children[0, node] >= 0).any())
        assert float(draft.probs[0, node].sum()) == pytest.approx(1.0 if busy else 0.0, abs=1e-12)
        assert bool((draft.shortlist[0, node] >= 0).any()) == busy


@pytest.mark.parametrize(
    "verifier", [TopDown(SpeculativeSampling()), BlockVerification(), BottomUp(SpeculativeSampling())], ids=named
)
def test_to_drop_what_was_drawn_is_biased(verifier: PathVerifier) -> None:
    """What the engine did once: after an error the step went on without drafts."""
    world, joint = world_of(IID()), torch.zeros_like(world_of(IID()).joint)
    for draft, chance in every_one(world, IID(), Chain(3)):
        kept = Draft.nothing(draft.tree.tokens[:, 0]) if draft.failure else draft
        joint += emitted(world, verifier, kept, torch.tensor([chance], dtype=torch.float64))[0]
    assert float((joint - world.joint).abs().sum() / 2) > 0.01


def test_an_error_in_one_row_ends_all_rows_and_both_texts_stay_exact() -> None:
    """The rows' joint law is the product of the target's: neither row's text depends on the other's tokens."""
    world, rule = world_of(IID()), BottomUp(SpeculativeSampling())
    both = torch.zeros(81, 81, dtype=torch.float64)
    ended = 0
    for draft, chance in every_one(world, IID(), Chain(2), batch=2):
        ended += draft.failure is not None
        one, two = (emitted(world, rule, among(draft, [row]), torch.ones(1).double())[0].flatten() for row in (0, 1))
        both += chance * torch.outer(one, two)
    assert ended > 1
    torch.testing.assert_close(both, torch.outer(world.joint.flatten(), world.joint.flatten()), rtol=0, atol=1e-10)


# --- Whatever fails --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BreakingScheme:
    """A scheme whose sampler breaks at some of the rows it is asked to draw from."""

    inner: Scripted
    name = "breaking"
    deterministic = False
    independent = True
    lone_draft_is_drawn = True
    several_rows = False
    uniforms = Uniforms.OF_TOKENS

    def sample(self, draft_probs: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        if self.inner.told and float(draft_probs[0, 0, 0]) > 0.3:
            raise Broken("a sampler")
        return self.inner.sample(draft_probs, counts, uniforms, k)

    def probability(self, draft_probs: Tensor, drafts: Tensor) -> Tensor:
        return self.inner.probability(draft_probs, drafts)


@dataclass(frozen=True)
class BreaksOpening(Confident):
    """A policy that breaks when it looks at some tokens."""

    def opened(self, drawn: Drawn) -> Tensor:
        if unlucky(drawn.tokens):
            raise Broken("a policy")
        return super().opened(drawn)


@dataclass(frozen=True)
class BreaksCounting(Confident):
    """The same, later."""

    def counts(self, opened: Opened) -> Tensor:
        if opened.drawn is not None and unlucky(opened.drawn.tokens):
            raise Broken("a policy")
        return super().counts(opened)


@pytest.mark.parametrize(
    ("policy", "wrapped"),
    [
        (Chain(3), BreakingScheme),
        (Confident(LATE, 0.1), BreakingScheme),
        (BreaksOpening(LATE, 0.1), None),
        (BreaksCounting(LATE, 0.1), None),
    ],
)
def test_schemes_and_policies_may_fail_as_well(policy: TreePolicy, wrapped: Wrapped | None) -> None:
    world, joint = DeepWorld.random(5), torch.zeros_like(DeepWorld.random(5).joint)
    rule, ended = BottomUp(RecursiveRejection()), 0
    for draft, chance in every_one(world, IID(), policy, wrapped=wrapped or (lambda scheme: scheme)):
        ended += isinstance(draft.failure, Broken)
        joint += emitted(world, rule, draft, torch.tensor([chance], dtype=torch.float64))[0]
    assert ended > 0
    torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)


BOTH = (Chain(3), Confident((1, 1, 1), 0.0))


def grow_with(error: BaseException, depth: int, policy: TreePolicy) -> Draft:
    world = DeepWorld.random(5)

    def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
        if frontier.depth == depth:
            raise error
        return world.propose(frontier)

    return grow(torch.zeros(1, dtype=torch.int64), policy, TopK(), propose, Silence(()))


@pytest.mark.parametrize("policy", BOTH, ids=str)
def test_the_error_is_kept(policy: TreePolicy) -> None:
    error = Broken("here")
    for depth in (1, 2):
        draft = grow_with(error, depth, policy)
        assert draft.failure is error and draft.tree.topology.height == depth
    assert grow_with(error, 3, policy).failure is None


@pytest.mark.parametrize("policy", BOTH, ids=str)
def test_before_the_first_draft_an_error_is_raised(policy: TreePolicy) -> None:
    with pytest.raises(Broken, match="here"):
        grow_with(Broken("here"), 0, policy)


@pytest.mark.parametrize("policy", BOTH, ids=str)
@pytest.mark.parametrize("error", [UnpairedScheme("a"), VocabularyMismatch("b"), KeyboardInterrupt(), SystemExit()])
def test_what_a_user_must_mend_and_interruptions_pass_through(policy: TreePolicy, error: BaseException) -> None:
    with pytest.raises(type(error)):
        grow_with(error, 1, policy)
