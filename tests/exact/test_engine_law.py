"""The law of the text is the target's whatever the engine composes, summed over all drafts and all verdicts."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import pytest
import torch
from choices import Toy, distance, law_of
from doubles import Count
from on_device import counted, on_device
from torch import Tensor

from polydraft import AdaptiveThreshold, Chain, ModelDrafter, NaiveMatch, TopDown, TopK, Widths
from polydraft.drafters import Drafter, DraftRequest, LookupFirst, Session
from polydraft.drafters.model import draft_rows
from polydraft.engine.loop.faults import LOST, NO_LAW
from polydraft.engine.target_law import JointCriteria
from polydraft.models import Forward
from polydraft.planning import Opening
from polydraft.probs import Noise
from polydraft.reading import Features, Step, Text
from polydraft.schemes import IID, Scheme
from polydraft.trees import Draft, Frontier, LearningPolicy, Lookup, Riders, TreePolicy, TreeShape, grow
from polydraft.trees.growing import BestFirst, Confident
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TraversalVerification,
)

TARGET, DRAFT, PROMPT = Toy(3, 0), Toy(3, 1), [1, 0, 1]
SMALL, SMALL_DRAFT = Toy(2, 0), Toy(2, 1)
LEARNING = AdaptiveThreshold(2, 0.6, step=0.3, smoothing=0.1)
NEAR = 1e-12


@dataclass(frozen=True)
class Halting(TreePolicy):
    """Goes on or not by the draft probabilities of what was just drawn, as if by whim."""

    shape: TreeShape
    stops = True

    def grows_on(self, depth: int, chances: Tensor) -> bool:
        return crc32(f"whim {depth} {chances.tolist()}".encode()) % 2 > 0


class HaltingByError(Halting):
    """Breaks where it would not go on."""

    def grows_on(self, depth: int, chances: Tensor) -> bool:
        if not super().grows_on(depth, chances):
            raise RuntimeError("a whim")
        return True


TREES: list[tuple[PathVerifier, TreePolicy]] = [
    (TopDown(RecursiveRejection()), Widths((2, 1))),
    (BottomUp(RecursiveRejection()), BestFirst(4)),
    (TopDown(Optimal()), Widths((2,))),
    (TopDown(RecursiveRejectionWithoutReplacement()), Confident((2, 1), 0.4)),
    (TraversalVerification(IID()), Chain(2)),
    (BlockVerification(), Confident((1, 1, 1), 0.3)),
    (ByShape(), Widths((2, 1))),
    (BlockVerification(), Halting(Chain(3).shape)),
    (BottomUp(Optimal()), Halting(Widths((2, 1)).shape)),
    (TraversalVerification(IID()), Halting(Widths((2, 1)).shape)),
]
each_tree = pytest.mark.parametrize(("rule", "policy"), TREES, ids=lambda one: getattr(one, "name", type(one).__name__))


class Scheming(LearningPolicy):
    """A planner that chooses by all that it may see: what it was told of finished steps, and the committed text."""

    weighs_lookups = True
    largest = Widths((2, 1)).shape
    trees = (TreeShape(()), Chain(1).shape, Chain(2).shape, largest)
    stops = True

    def __init__(self, salt: int) -> None:
        self.salt, self.seen, self.chosen = salt, "", set[object]()

    def suited(self, usual: TreePolicy) -> None:
        pass

    def texts_opened(self, opening: Opening) -> None:
        self.seen = f"{self.salt} {opening!r}"

    def learn(self, *told: object) -> None:
        self.seen += repr(told)

    @property
    def uses_lookups(self) -> bool:
        answer = bool(self._one_of(3, "looks"))
        self.chosen.add(f"looks: {answer}")
        return answer

    def rows_with_lookup(self, found: Sequence[Lookup]) -> tuple[int, ...]:
        taken = tuple(row for row, one in enumerate(found) if one.parents and self._one_of(2, found))
        self.chosen.add(bool(taken))
        return taken

    def grows_on(self, depth: int, chances: Tensor) -> bool:
        answer = bool(self._one_of(2, (depth, chances.tolist())))
        self.chosen.add(f"goes on: {answer}")
        return answer

    @property
    def shape(self) -> TreeShape:
        shape = self.trees[self._one_of(len(self.trees))]
        self.chosen.add(shape)
        return shape

    def _one_of(self, count: int, more: object = "") -> int:
        return crc32(f"{self.seen}{more}".encode()) % count


class Refusing(Toy):
    """Raises when it is to score a token that was drawn."""

    def forward(self, tokens: Tensor, *inputs: Any, **named: Any) -> Forward:
        if not named.get("logits_to_keep") and bool((tokens == 1).any()):
            raise RuntimeError("not this one")
        return super().forward(tokens, *inputs, **named)


class Unusable(Toy):
    """Has no law after a token."""

    def forward(self, tokens: Tensor, *inputs: Any, **named: Any) -> Forward:
        found = super().forward(tokens, *inputs, **named).logits
        return Forward(found.masked_fill((tokens[:, -found.shape[1] :] == 1).unsqueeze(-1), torch.nan), {})


@dataclass
class Around(Drafter):
    """A model drafter of whose doings a derived class changes some."""

    inner: Drafter
    name = "around"

    def check(self, scheme: Scheme) -> None:
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        return self.inner.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        return self.inner.read(state, text, features)

    def draft(self, state: Any, request: DraftRequest) -> tuple[Any, Any]:
        return self.inner.draft(state, request)

    def commit(self, state: Any, step: Step) -> Any:
        return self.inner.commit(state, step)


class OddRiders(Around):
    """Brings riders that it did not announce, if its first draft is a certain token."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Any, Any]:
        draft, state = super().draft(state, request)
        if int(draft.tree.tokens[0, 1]) != 1:
            return draft, state
        ones, nodes = torch.ones(1, 1, dtype=torch.int64), draft.tree.tokens.shape[1]
        riders = Riders(ones, ones, torch.ones(1, 1, nodes + 1, dtype=torch.bool), ones.bool())
        return replace(draft, riders=riders), state


class Unkeeping(Around):
    """Raises when a draft was kept."""

    def commit(self, state: Any, step: Step) -> Any:
        if step.verdict.kept[0]:
            raise RuntimeError("kept")
        return super().commit(state, step)


class Ending(Around):
    """Raises before it draws, after a certain token."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        if int(request.text.last()) == 1:
            raise RuntimeError("the end")
        return super().draft(state, request)


class Neighbourly(Around):
    """Raises for what it drew in another row, so that this row's drafts are dropped as well."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        draft, after = super().draft(state, request)
        if int(draft.tree.tokens[1, 1]) == 1:
            raise RuntimeError("there")
        return draft, after


@dataclass
class Unlucky(Around):
    """Raises for a token that it drew, behind growth: the first draft, or the last one there is."""

    node: int = 1

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        draft, after = super().draft(state, request)
        self.behind(request.noise)
        there = draft.tree.tokens[0][draft.tree.valid[0]]
        if int(there[self.node]) == 1:
            raise RuntimeError("unlucky")
        return draft, after

    def behind(self, noise: Noise) -> None:
        """Draw nothing."""


@dataclass
class Losing(Unlucky):
    """The same, having drawn more than the tree, which no drafter may do."""

    def behind(self, noise: Noise) -> None:
        noise.uniform(1)


def checked(
    model: Toy, drafter: Any, rule: PathVerifier, policy: TreePolicy, prompts: Any, new: int, **options: Any
) -> set[str]:
    law, failures = law_of(model, drafter, rule, policy, prompts, new, **options)
    assert distance(law, model.texts(prompts[0], new, options.get("eos", frozenset()))) < NEAR
    return failures


@each_tree
def test_one_step_of_a_model(rule: PathVerifier, policy: TreePolicy) -> None:
    assert not checked(SMALL, ModelDrafter(SMALL_DRAFT), rule, policy, [PROMPT], 3, steps=1, eos=frozenset({1}))


@each_tree
def test_one_step_that_looks_up_or_asks(rule: PathVerifier, policy: TreePolicy) -> None:
    for prompt in ([1, 0, 1, 1, 0], [1, 0]):
        assert not checked(SMALL, LookupFirst(ModelDrafter(SMALL_DRAFT), 2, 3), rule, policy, [prompt], 3, steps=1)


@pytest.mark.parametrize("rule", [BlockVerification(), BottomUp(Optimal())])
def test_one_step_of_a_policy_that_breaks_at_what_was_drawn(rule: PathVerifier) -> None:
    policy = HaltingByError(Chain(3).shape)
    failures = checked(SMALL, ModelDrafter(SMALL_DRAFT), rule, policy, [PROMPT], 3, steps=1)
    assert failures == {"RuntimeError: a whim"}


@each_tree
@pytest.mark.parametrize("kind", [Refusing, Unusable])
def test_one_step_that_fails_by_what_was_drawn(kind: type[Toy], rule: PathVerifier, policy: TreePolicy) -> None:
    assert checked(SMALL, ModelDrafter(kind(2, 1)), rule, policy, [[0, 1, 0]], 3, steps=1) or policy.shape.depth == 1


@pytest.mark.long(5)
@pytest.mark.parametrize(("rule", "policy"), TREES)
@pytest.mark.parametrize("kind", [Toy, Unusable])
def test_one_step_on_a_device_that_is_not_waited_for(kind: type[Toy], rule: PathVerifier, policy: TreePolicy) -> None:
    with counted(strict=False):
        failures = checked(SMALL, ModelDrafter(kind(2, 1)), rule, policy, [[0, 1, 0]], 3, steps=1, place=on_device)
    told = kind is Unusable and policy.shape.depth > 1  # the root has a law
    assert failures == ({f"InvalidProbabilities: {NO_LAW}"} if told else set())


@pytest.mark.long(4)
@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        (BlockVerification(), Chain(2)),
        (TraversalVerification(IID()), Chain(2)),
        (TopDown(RecursiveRejection()), Widths((2,))),
        (BottomUp(Optimal()), Chain(2)),
    ],
    ids=lambda one: getattr(one, "name", type(one).__name__),
)
@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({1})])
def test_one_step_of_rows_that_go_on_in_step(rule: PathVerifier, policy: TreePolicy, eos: frozenset[int]) -> None:
    """What a row gives back, since its neighbour gained less or ended, changes no law."""
    prompts, seen = [[1, 0], [0, 0]], set[tuple[int, ...]]()

    def never(input_ids: Tensor, scores: Any) -> bool:
        seen.add(tuple(input_ids.shape))
        return False

    together = JointCriteria([never], torch.tensor(prompts), [2, 2], pad=1)
    checked(SMALL, ModelDrafter(SMALL_DRAFT), rule, policy, prompts, 3, steps=1, eos=eos, together=together)
    assert seen >= {(2, 3), (2, 4)}


def test_one_step_of_three_tokens() -> None:
    for rule in (TopDown(RecursiveRejection()), BlockVerification(), BottomUp(Optimal())):
        for drafter in (ModelDrafter(DRAFT), LookupFirst(ModelDrafter(DRAFT), 2, 3), ModelDrafter(Unusable(3, 1))):
            checked(TARGET, drafter, rule, Chain(2), [[1, 0, 2, 1, 0]], 3, steps=1)


def test_riders_that_cannot_be_scored_cost_no_draft_that_was_drawn() -> None:
    for rule in (TopDown(RecursiveRejection()), BlockVerification()):
        failures = checked(TARGET, OddRiders(ModelDrafter(DRAFT)), rule, Chain(2), [PROMPT], 3, steps=1)
        assert {one.split(":")[0] for one in failures} == {"InvalidDraft"}


@pytest.mark.long(1)
@pytest.mark.parametrize("kind", [Around, Unkeeping, Ending])
def test_all_steps_of_drafters_that_fail_between_them(kind: type[Around]) -> None:
    for rule, policy in ((TopDown(RecursiveRejection()), Chain(1)), (BlockVerification(), LEARNING)):
        for inner in (ModelDrafter(SMALL_DRAFT), LookupFirst(ModelDrafter(SMALL_DRAFT), 1)):
            failures = checked(SMALL, kind(inner), rule, policy, [[0, 1, 1, 0]], 3)
            assert bool(failures) == (kind is not Around)


@pytest.mark.long(1)
@pytest.mark.parametrize(
    "rule",
    [
        TopDown(RecursiveRejection()),
        BottomUp(RecursiveRejection()),
        ByShape(BlockVerification(), TopDown(RecursiveRejection())),
    ],
)
def test_a_planner_that_chooses_by_all_it_may_see(rule: PathVerifier) -> None:
    chosen = set[object]()
    for salt in range(12):
        planner, drafter = Scheming(salt), LookupFirst(ModelDrafter(SMALL_DRAFT), 1, 2)
        prompts = [[0, 1, 1, 0]] if salt else [[1, 0, 1], [0, 0, 1]]
        assert not checked(SMALL, drafter, rule, planner, prompts, 2 if salt else 1)
        chosen |= planner.chosen
    both = {f"{what}: {answer}" for what in ("goes on", "looks") for answer in (True, False)}
    assert chosen == {*Scheming.trees, True, False, *both}


@pytest.mark.long(5)
@each_tree
@pytest.mark.parametrize("there", ["host", "device"])
def test_one_step_of_a_target_without_a_law_below_some_drafts(
    there: str, rule: PathVerifier, policy: TreePolicy
) -> None:
    """Where it has none, plain decoding ends if it comes there; a draft alone changes nothing."""
    options = {"place": on_device} if there == "device" else {}
    with counted(strict=False) if options else nullcontext():
        assert not checked(Unusable(2), ModelDrafter(SMALL_DRAFT), rule, policy, [[0, 1, 0]], 3, steps=1, **options)


@dataclass
class DeadEnd:
    """A processor that leaves nothing below a token, or raises there; with or without a state."""

    raises: bool
    keeps_state: bool
    name = "dead end"

    def fork(self, memo: dict[int, Any]) -> "DeadEnd":
        return replace(self)

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        dead = history[:, -1] == 1
        if self.raises and bool(dead.any()):
            raise ArithmeticError("dead end")
        return scores.masked_fill(dead.unsqueeze(-1), -torch.inf)


@pytest.mark.long(10)
@each_tree
@pytest.mark.parametrize("keeps_state", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_one_step_with_a_processor_that_has_dead_ends(
    raises: bool, keeps_state: bool, rule: PathVerifier, policy: TreePolicy
) -> None:
    def rest(found: list[int], missing: int) -> dict[tuple[int, ...], float]:
        return SMALL.texts([0, 1, 0, *found], missing)

    given = {"processors": (DeadEnd(raises, keeps_state),), "rest": rest, "steps": 1}
    law, failures = law_of(SMALL, ModelDrafter(SMALL_DRAFT), rule, policy, [[0, 1, 0]], 3, **given)
    assert distance(law, SMALL.texts([0, 1, 0], 3)) < 1e-8 and not failures  # processors get single precision


@pytest.mark.long(10)
@each_tree
@pytest.mark.parametrize("node", [1, -1])
def test_one_step_of_a_drafter_that_raises_behind_growth_for_what_it_drew(
    node: int, rule: PathVerifier, policy: TreePolicy
) -> None:
    failures = checked(SMALL, Unlucky(ModelDrafter(SMALL_DRAFT), node=node), rule, policy, [PROMPT], 3, steps=1)
    assert failures == {"RuntimeError: unlucky"}


def test_a_neighbour_may_cost_a_row_its_drafts_but_not_its_law() -> None:
    assert checked(SMALL, Neighbourly(ModelDrafter(SMALL_DRAFT)), BlockVerification(), Chain(1), [[1, 0], [0, 0]], 2)


def test_the_sum_notices_drafts_that_are_dropped_for_what_they_are() -> None:
    law, told = law_of(TARGET, Losing(ModelDrafter(DRAFT)), BlockVerification(), Chain(2), [PROMPT], 3, steps=1)
    assert distance(law, TARGET.texts(PROMPT, 3)) > 0.05 and told == {f"RuntimeError: unlucky{LOST}"}


class Meddling(Around):
    """Changes what it was given, or what it returns, where it drew a certain token."""

    way = ""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Any, Any]:
        text = request.text
        draft, after = super().draft(state, request)
        tree = draft.tree
        if len(tree.tokens[0]) > 1 and int(tree.tokens[0, 1]) == 1:
            WAYS[self.way](draft, text)
        return draft, after


def pruned(draft: Draft, text: Text) -> None:
    draft.tree.valid[0, 1:] = False


def another(draft: Draft, text: Text) -> None:
    draft.tree.tokens[0, 1], draft.atoms[0, 1] = 0, 0


def other_rows(draft: Draft, text: Text) -> None:
    draft.probs[0, 0] = draft.probs[0, 0].flip(-1)


def other_text(draft: Draft, text: Text) -> None:
    text.tokens.fill_(0)


def no_flag(draft: Draft, text: Text) -> None:
    object.__setattr__(draft, "sound", True)


WAYS = {"pruned": pruned, "another": another, "rows": other_rows, "text": other_text, "flag": no_flag}


@pytest.mark.long
@each_tree
@pytest.mark.parametrize("way", WAYS)
def test_one_step_of_a_drafter_that_changes_what_was_drawn(way: str, rule: PathVerifier, policy: TreePolicy) -> None:
    drafter = Meddling(Foreign(SMALL_DRAFT))
    drafter.way = way
    failures = checked(SMALL, drafter, rule, policy, [PROMPT], 3, steps=1)
    assert bool(failures) == (way != "text")


class Foreign(ModelDrafter):
    """One that nobody trusts, and that spoils what it is asked about."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Any, Any]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            found = draft_rows(state.reader.grow(text, frontier), state.params, None, scheme)
            frontier.tokens.fill_(0)
            frontier.ancestors.fill_(True)
            return found

        draft = grow(text.last(), policy, scheme, propose, noise)
        return draft, replace(state, reader=state.reader.grown(text, draft))


@pytest.mark.long(5)
@each_tree
def test_one_step_of_a_drafter_that_spoils_what_it_is_asked_about(rule: PathVerifier, policy: TreePolicy) -> None:
    for drafter in (Foreign(SMALL_DRAFT), ModelDrafter(SMALL_DRAFT)):  # the second finds shared shapes as they were
        checked(SMALL, drafter, rule, policy, [PROMPT], 3, steps=1)


class OfTheBatch(Drafter):
    """Draws from other rows beside others than alone, and raises beside others where it drew a certain token."""

    name = "of the batch"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Count:
        return Count(len(text.counts))

    def draft(self, state: Count, request: DraftRequest) -> tuple[Draft, Count]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        row = torch.tensor([0.8, 0.2] if state.rows > 1 else [0.3, 0.7], dtype=torch.float64)

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            size = frontier.tokens.shape
            if state.rows > 1 and frontier.depth and bool((frontier.tokens[0] == 1).any()):
                raise ArithmeticError("not this token")
            return torch.arange(2).expand(*size, 2), row.expand(*size, 2)

        return grow(text.last(), policy, scheme, propose, noise), state

    def commit(self, state: Count, step: Step) -> Count:
        return state


def test_rows_that_depend_on_the_batch_are_drawn_once() -> None:
    for rule in (TopDown(RecursiveRejection()), BlockVerification()):
        assert checked(SMALL, OfTheBatch(), rule, Chain(2), [[1, 0], [0, 0]], 2, steps=1)


def test_rows_that_depend_on_the_batch_are_exact_where_drafts_are_not_drawn() -> None:
    """A row then takes the drafts that it has alone, whatever it had beside the other."""
    rule = TopDown(NaiveMatch(TopK()))
    assert checked(SMALL, OfTheBatch(), rule, Widths((2, 1)), [[1, 0], [0, 0]], 2, steps=1)
