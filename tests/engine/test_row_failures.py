"""A drafter that fails in one row of a batch: the others write what they write alone, and nobody's law changes."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from choices import Toy, distance, law_of
from doubles import Count, Unparted, Whole, perturbed, tiny_model
from heads import VOCAB, block_drafter, eagle_drafter, medusa_drafter
from torch import Tensor

import polydraft
from polydraft import AdaptiveThreshold, BestFirst, Chain, HuggingFaceModel, ModelDrafter, Widths, generate_many
from polydraft.drafters import (
    Drafter,
    DraftRequest,
    EnsembleDrafter,
    LookupFirst,
    MergedDrafter,
    RoutedDrafter,
    Session,
    finished,
    is_sound,
)
from polydraft.drafters.text.jacobi import JacobiDrafter
from polydraft.drafters.text.lookahead import LookaheadDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.ouroboros import OuroborosDrafter
from polydraft.drafters.text.recycling import RecyclingDrafter
from polydraft.drafters.text.suffix import SuffixDrafter
from polydraft.engine import Ending, Method, Prompts, Request, RunningBatch, TargetLaw
from polydraft.engine.choices import default_verifier
from polydraft.engine.loop.step import begin, step
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.schemes import IID, Scheme
from polydraft.trees import Draft, Frontier, Pieces, TreePolicy, Verdict, grow
from polydraft.verifiers import BlockVerification

NEW = 14
CHAIN = Chain(4)
POISON = 7
PROMPTS = {"first": [3, 1, 4, 1, 5], "poisoned": [POISON, 2, POISON], "last": [5, 8, 5, 8, 5, 8, 5], "late": [9, 2]}


def target() -> Any:
    return tiny_model(vocab=VOCAB)


def model() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), 0.05)))


def ensemble() -> EnsembleDrafter:
    return EnsembleDrafter(((model().model, None), (HuggingFaceModel(perturbed(target(), 0.1)), None)))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": model,
    "ensemble": ensemble,
    "ngram": lambda: NgramDrafter(3, 1),
    "jacobi": JacobiDrafter,
    "recycling": RecyclingDrafter,
    "lookahead": LookaheadDrafter,
    "ouroboros": lambda: OuroborosDrafter(model()),
    "lookup first": lambda: LookupFirst(model(), 1),
    "routed": lambda: RoutedDrafter((NgramDrafter(), RecyclingDrafter()), eagle_drafter()),
    "merged": lambda: MergedDrafter((NgramDrafter(),), block_drafter("mixing")),
    "eagle": eagle_drafter,
    "block": lambda: block_drafter("markov"),
    "medusa": medusa_drafter,
    "suffix": SuffixDrafter,
}


@cache
def drafter_of(name: str) -> Drafter:
    return DRAFTERS[name]()


@dataclass
class Fragile(Drafter):
    """A drafter that raises in one of its verbs once it sees a certain text of so many tokens."""

    inner: Drafter
    verb: str
    length: int = 6
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.needs = self.inner.name, self.inner.needs

    @property
    def sound(self) -> bool:
        return is_sound(self.inner)

    def looked(self, verb: str, text: Text) -> None:
        bad = (text.tokens[:, 0] == POISON) & (text.tokens[:, 2] == POISON) & (text.lengths >= self.length)
        if verb == self.verb and bool(bad.any()):
            raise ArithmeticError("this text is poison")

    def defaults(self, params: Any) -> Any:
        return self.inner.defaults(params)

    def check(self, scheme: Scheme) -> None:
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        return self.inner.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        self.looked("read", text)
        return self.inner.read(state, text, features)

    def draft(self, state: Any, request: DraftRequest) -> Any:
        text = request.text
        self.batches.append(len(text.counts))
        found = self.inner.draft(state, request)
        self.looked("draft", text)
        return found

    def commit(self, state: Any, step: Step) -> Any:
        after = self.inner.commit(state, step)
        self.looked("commit", step.text)
        return after

    def finish(self, state: Any, text: Text, row: int) -> Any:
        self.looked("finish", text)
        return finished(self.inner, state, text, row)


def written(
    drafter: Drafter, heat: float, size: int, names: Any = PROMPTS, policy: TreePolicy = CHAIN
) -> dict[Any, Any]:
    chosen = {name: torch.tensor(PROMPTS[name]) for name in names}
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": heat, "eos_token_id": None, "policy": policy}
    options |= {"per_prompt": {name: {"seed": 3 + len(name)} for name in names}}
    options |= {} if not heat else {"top_k": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*decoded without drafts")
        done = generate_many(target(), chosen, drafter=drafter, batch_size=size, **options)
        return {one.name: (one.tokens, one.target_calls, one.accepted) for one in done}


@cache
def well(name: str, heat: float) -> dict[Any, Any]:
    """Return what a batch writes with a drafter that does not fail."""
    return written(drafter_of(name), heat, 3)


OTHERS = [name for name in PROMPTS if name != "poisoned"]


@pytest.mark.long(3)
@pytest.mark.parametrize("heat", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("verb", ["draft", "commit", "read", "finish"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_each_row_is_the_text_that_it_is_alone(name: str, verb: str, heat: float) -> None:
    """Tokens, calls and accepted drafts; also of the row in which the drafter fails, which fails there alone too."""
    sick = Fragile(drafter_of(name), verb, 3 if verb == "read" else 6)
    found, unhurt = written(sick, heat, 3), well(name, heat)
    assert max(sick.batches) == 3
    assert {one: found[one] for one in OTHERS} == {one: unhurt[one] for one in OTHERS}
    for prompt in PROMPTS:
        assert found[prompt] == written(sick, heat, 1, [prompt])[prompt], prompt


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_a_policy_has_learnt_of_a_row_goes_with_it(heat: float) -> None:
    policy = AdaptiveThreshold(4, 0.3, goal=0.5, step=0.2, smoothing=0.5)
    sick = Fragile(drafter_of("model"), "draft", 9)
    found, unhurt = written(sick, heat, 3, policy=policy), written(drafter_of("model"), heat, 3, policy=policy)
    assert {one: found[one] for one in OTHERS} == {one: unhurt[one] for one in OTHERS}
    for prompt in PROMPTS:
        assert found[prompt] == written(sick, heat, 1, [prompt], policy)[prompt], prompt


class Sick(HuggingFaceModel):
    """Its rows behind some tokens are not numbers."""

    def forward(self, tokens: Tensor, *inputs: Any, **named: Any) -> Any:
        found = super().forward(tokens, *inputs, **named)
        scored = tokens[:, -found.logits.shape[1] :]
        return replace(found, logits=found.logits.masked_fill((scored % 4 == 2).unsqueeze(-1), torch.nan))


@pytest.mark.long(3)
@pytest.mark.parametrize("policy", [Chain(4), Widths((2, 1)), BestFirst(6)], ids=repr)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_that_are_no_numbers_cost_nobody_else_a_draft(heat: float, policy: TreePolicy) -> None:
    """Whether a text is drafted for hangs on its own rows alone, however many neighbours have unusable ones."""
    sick = ModelDrafter(Sick(perturbed(target(), 0.05)))
    found = written(sick, heat, 3, policy=policy)
    for prompt in PROMPTS:
        assert found[prompt] == written(sick, heat, 1, [prompt], policy)[prompt], prompt
    assert 0 < sum(one[2] for one in found.values())


def test_rows_that_are_well_are_a_batch_again() -> None:
    sick = Fragile(drafter_of("model"), "draft")
    written(sick, 0.0, 4)
    first = sick.batches.index(4)
    assert sick.batches[first:] == [4, 4, 1, 1, 1, 1, *[3] * (len(sick.batches) - first - 6)]
    assert len(sick.batches) > first + 7


def test_a_drafter_that_does_not_part_its_rows_fails_in_all_of_them() -> None:
    sick = Fragile(Unparted(drafter_of("model")), "draft")
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": None, "policy": Chain(2)}
    prompts = torch.tensor([[3, 1, 4], [POISON, 2, POISON]])
    with pytest.warns(RuntimeWarning, match="poison.*; the rest is decoded without drafts") as said:
        found = polydraft.generate(target(), prompts, drafter=sick, **options)
    assert found.statistics.fallback == "ArithmeticError: this text is poison" and len(said) == 1
    assert torch.equal(found.sequences, polydraft.generate(target(), prompts, drafter="none", **options).sequences)
    sick = Fragile(drafter_of("model"), "draft")
    with pytest.warns(RuntimeWarning, match="poison.*; rows in which it fails are decoded without drafts") as said:
        again = polydraft.generate(target(), prompts, drafter=sick, **options)
    assert len(said) == 1 and torch.equal(again.sequences, found.sequences)
    assert again.statistics.accepted > found.statistics.accepted


def test_a_drafter_that_fails_in_every_row_is_asked_for_each_once_and_no_more() -> None:
    sick = Fragile(drafter_of("eagle"), "draft", 0)
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": None, "policy": Chain(2)}
    prompts = torch.tensor([[POISON, 1, POISON], [POISON, 2, POISON]])
    with pytest.warns(RuntimeWarning, match="poison.*; the rest is decoded without drafts") as said:
        found = polydraft.generate(target(), prompts, drafter=sick, **options)
    assert sick.batches == [2, 1, 1] and len(said) == 1
    assert torch.equal(found.sequences, polydraft.generate(target(), prompts, drafter="none", **options).sequences)


def test_a_drafter_that_fails_for_several_rows_only_drafts_for_them_apart() -> None:
    class Narrow(Fragile):
        def looked(self, verb: str, text: Text) -> None:
            if verb == "draft" and len(text.counts) > 1:
                raise MemoryError("too many")

    assert written(Narrow(drafter_of("model"), ""), 1.0, 3) == written(drafter_of("model"), 1.0, 3)


def come_and_gone(drafter: Drafter, heat: float) -> dict[Any, list[Any]]:
    """Write texts of different lengths, two at a time, so that rows join, end and change places; nothing may fail."""
    params, left, found = SamplingParams(temperature=heat), [*PROMPTS], dict[Any, list[Any]]()
    method = Method(drafter, default_verifier(drafter, params), CHAIN)
    batch = RunningBatch(HuggingFaceModel(target()), method, 2, 40)
    while left or batch.running:
        batch.sweep()
        while left and batch.free:
            name = left.pop(0)
            tokens = torch.tensor(PROMPTS[name])
            ending, noise = Ending(len(tokens) + NEW - len(left)), Noise.from_seed(len(name), 1)
            batch.join(Request(name, tokens, TargetLaw(params), ending, noise))
        last = batch.step()
        assert last is not None and not last.block.faults
        for name, gained in last.gains().items():
            found.setdefault(name, []).append((gained.tokens, gained.drafted, gained.accepted))
        batch.sweep()
    return found


@pytest.mark.long(2)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("verb", ["put", "cut"])
def test_an_error_as_texts_come_and_go_costs_no_draft_and_is_no_failure(verb: str, heat: float) -> None:
    """A text that cannot join the state of others has one of its own; what cannot be forgotten stays in its row."""
    raised, kind = list[str](), type("Stiff", (Whole,), {})

    def refuse(*_: Any) -> None:
        raised.append(verb)
        raise ArithmeticError("stiff")

    setattr(kind, verb, refuse)

    class Stiff(Unparted):
        def start(self, text: Text, session: Session) -> Whole:
            return kind(self.inner.start(text, session))

    found = come_and_gone(Stiff(drafter_of("model")), heat)
    assert found == come_and_gone(drafter_of("model"), heat)
    assert found.keys() == PROMPTS.keys() and all(sum(one[2] for one in own) for own in found.values())
    assert len(raised) >= len(PROMPTS) - 2


# The law, where errors follow from what was drawn.

LAW = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)


@dataclass(frozen=True)
class Dicey(Drafter):
    """Draws from fixed rows, and breaks in a batch when a row of it draws a certain token, in growth or behind it."""

    row: int
    grows: bool
    loses: bool = False
    name = "dicey"
    sound = True

    def check(self, scheme: Scheme) -> None:
        pass

    def start(self, text: Text, session: Session) -> Count:
        return Count(len(text.counts))

    def draft(self, state: Count, request: DraftRequest) -> tuple[Draft | Pieces, Count]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise

        def broken(tokens: Tensor) -> bool:
            return state.rows > 1 and bool((tokens[self.row] == 1).any())

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            if self.grows and frontier.depth and broken(frontier.tokens):
                raise ArithmeticError("not this token")
            size = frontier.tokens.shape
            return torch.arange(3).expand(*size, 3), LAW[frontier.depth].expand(*size, 3)

        draft = grow(text.last(), policy, scheme, propose, noise)
        if self.loses:
            noise.uniform(1)
        if not self.grows and broken(draft.tree.tokens[:, 1:]):
            raise ArithmeticError("not this draft")
        return draft, state

    def commit(self, state: Count, step: Step) -> Count:
        return state


TOY, TEXTS = Toy(3), [[1, 0, 1], [0, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_law_is_the_targets_whatever_an_error_in_a_batch_follows_from(parts: bool, row: int, grows: bool) -> None:
    """Summed over all drafts and verdicts of both texts; the first's own tokens or its neighbour's break the batch."""
    drafter = Dicey(row, grows) if parts else Unparted(Dicey(row, grows))
    law, failures = law_of(TOY, drafter, BlockVerification(), Chain(2), TEXTS, 2, steps=1)
    assert failures and distance(law, TOY.texts(TEXTS[0], 2)) < 1e-12


@pytest.mark.slow
def test_to_drop_what_a_row_has_drawn_for_what_it_is_would_be_seen() -> None:
    drafter = Unparted(Dicey(0, False, loses=True))
    law, _ = law_of(TOY, drafter, BlockVerification(), Chain(2), TEXTS, 2, steps=1)
    assert distance(law, TOY.texts(TEXTS[0], 2)) > 0.01


@dataclass(frozen=True)
class Changing(Drafter):
    """Draws from one row, and fails: beside others in growth or behind it, alone before it draws."""

    grows: bool = False
    name = "changing"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Count:
        return Count(len(text.counts))

    def draft(self, state: Count, request: DraftRequest) -> tuple[Draft | Pieces, Count]:
        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            if self.grows and frontier.depth == 1 and int(frontier.tokens[0, 0]) == 1:
                raise ArithmeticError("together")
            size = frontier.tokens.shape
            return torch.arange(3).expand(*size, 3), LAW[0].expand(*size, 3)

        if state.rows == 1:
            raise ArithmeticError("alone")
        draft = grow(request.text.last(), request.policy, request.scheme, propose, request.noise)
        if not self.grows:
            raise ArithmeticError("together")
        return draft, state

    def commit(self, state: Count, step: Step) -> Count:
        return state


def test_what_was_drawn_is_not_verified_by_the_numbers_that_drew_it() -> None:
    """A row that alone does not go on from what was drawn for it beside others is verified behind what drew it."""

    class Watching(BlockVerification):
        def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
            stood.append([one.clone() for one in noise.places()])
            assert draft.tree.tokens.shape[1] == 3, "what was drawn is verified"
            return super().verify(draft, target_probs, noise)

    stood, text = list[list[Tensor]](), Text(torch.tensor(TEXTS), torch.tensor([3, 3]))
    noise, laws = Noise.from_seed(0, 2), (TargetLaw(SamplingParams()),) * 2
    prompts = Prompts(text, laws, (Ending(9),) * 2, noise)
    batch = begin(TOY, Method(Changing(), Watching(), Chain(2)), prompts)
    _, block, _ = step(batch)
    fresh = noise.at((0, 0), text.lengths)
    first = fresh.places()
    grow(
        text.last(),
        Chain(2),
        IID(),
        lambda frontier: (torch.arange(3).expand(*frontier.tokens.shape, 3), LAW[0].expand(*frontier.tokens.shape, 3)),
        fresh,
    )
    assert block.faults and len(stood) == 2
    for row, (own,) in enumerate(stood):
        assert torch.equal(own, fresh.places()[row]) and not torch.equal(own, first[row])


@pytest.mark.filterwarnings("ignore:.*decoded without drafts")
@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_drafts_that_come_in_pieces_are_compared_with_what_was_drawn_too(wrapped: bool) -> None:
    """One row is looked up; the growth of the other's draft ends for a token that was drawn."""
    drafter, texts = Changing(grows=True), [[0, 1, 2, 0, 0], [2, 1, 2, 1, 2]]
    law, failures = law_of(
        TOY, LookupFirst(drafter, 2) if wrapped else drafter, BlockVerification(), Chain(2), texts, 2, steps=1
    )
    assert failures and distance(law, TOY.texts(texts[0], 2)) < 1e-7


@pytest.mark.long(2)
@pytest.mark.filterwarnings("ignore:.*decoded without drafts")
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["lookup first", "route"])
def test_an_error_for_one_row_costs_no_row_its_lookups(kind: str, heat: float) -> None:
    """Of rows for which the other drafter is not asked nothing was drawn, whatever it drew beside."""
    fragile = Fragile(model(), "draft", 3)
    drafter = LookupFirst(fragile, 2) if kind == "lookup first" else RoutedDrafter((NgramDrafter(),), fragile)
    found = written(drafter, heat, 3)
    for prompt in PROMPTS:
        assert found[prompt] == written(drafter, heat, 1, [prompt])[prompt], prompt
