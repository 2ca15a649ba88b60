"""What an attack on running batches and own drafters found: drafts that were lost, texts that followed others."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from choices import Toy
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import AdaptiveThreshold, Chain, HuggingFaceModel, ModelDrafter, NoDraft, SamplingParams, Widths
from polydraft.drafters import Drafter, DraftRequest, EnsembleDrafter, LookupFirst, Needs, Session, given_chain
from polydraft.engine import Ending, Method, Observer, Planner, Prompts, Request, RunningBatch, Statistics, TargetLaw
from polydraft.engine.loop.checking import checked
from polydraft.engine.loop.step import begin, capacity_for, step
from polydraft.errors import ContextOverflow, InvalidDraft, InvalidProbabilities
from polydraft.models import Forward, LayerSet
from polydraft.probs import Noise, whole_row
from polydraft.reading import Features, Step, Text
from polydraft.rows import per_row
from polydraft.schemes import IID, Given, Scheme, TopK
from polydraft.trees import Draft, Frontier, Riders, grow
from polydraft.verifiers import NaiveMatch, SharedNoise, TopDown

VOCAB, NEW = 24, 12
PROMPTS = {"one": [3, 1, 4, 1, 5], "two": [2, 7, 1, 2, 7, 1], "three": [4, 4], "four": [9]}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(target: PreTrainedModel) -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target, 0.1)))


def many(target: PreTrainedModel, own: Mapping[str, Any], **options: Any) -> tuple[dict[str, Any], str]:
    """Return the texts by name, and why a drafter failed."""
    run = polydraft.generate_many(target, PROMPTS, per_prompt=own, seed=5, **options)
    return {str(one.name): one for one in run}, run.statistics.fallback


def plain(target: PreTrainedModel) -> dict[str, list[int]]:
    return {name: one.tokens for name, one in many(target, {}, drafter="none", **GREEDY)[0].items()}


def alone(target: PreTrainedModel, name: str, seed: int, **options: Any) -> list[int]:
    prompt = torch.tensor([PROMPTS[name]])
    output = polydraft.generate(target, prompt, attention_mask=torch.ones_like(prompt), seed=seed, **options)
    return output.sequences[0, prompt.shape[1] :].tolist()


@pytest.mark.long(1)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_of_lookups_may_belong_to_others(heat: float, target: PreTrainedModel, model: ModelDrafter) -> None:
    """A draft by rows of which one piece has only rows that other texts took over."""
    options = {"drafter": LookupFirst(model, 1), "policy": 3, "max_new_tokens": NEW, "temperature": heat}
    options |= {"top_k": 0} if heat else {}
    own = {"three": {"drafter": "none"}, "four": {"drafter": "none"}}
    for size in (2, 3, 4):
        done, _ = many(target, own, batch_size=size, **options)
        assert {name for name, one in done.items() if one.accepted} >= {"one", "two"} - ({"one"} if heat else set())
        for name, one in done.items():
            assert one.tokens == alone(target, name, one.seed, **{**options, **own.get(name, {})})


@pytest.mark.long(1)
@pytest.mark.parametrize("size", [2, 4])
def test_texts_with_other_sampling_settings_are_those_of_their_seeds(
    size: int, target: PreTrainedModel, model: ModelDrafter
) -> None:
    """A drafter drafts for the settings that it was told of, which a neighbour need not have."""
    ensemble = EnsembleDrafter(((model.model, None), (model.model, SamplingParams(temperature=0.5))))
    own = {"two": {"temperature": 0.5}, "three": {"top_k": 5}}
    for drafter in (model, LookupFirst(model), ensemble):
        options = {"drafter": drafter, "policy": 3, "max_new_tokens": NEW, "temperature": 1.0, "top_k": 0}
        done, _ = many(target, own, batch_size=size, **options)
        for name, one in done.items():
            assert one.tokens == alone(target, name, one.seed, **{**options, **own.get(name, {})}), (name, drafter.name)


def test_a_policy_that_learns_takes_texts_of_one_drafter_together(target: PreTrainedModel, model: ModelDrafter) -> None:
    ours = {"drafter": model, "policy": AdaptiveThreshold(4, 0.1)}
    own = {name: {**ours, "max_new_tokens": new} for name, new in {"one": 16, "three": 9, "four": 9}.items()}
    options = {"drafter": "none", "max_new_tokens": 3, "temperature": 1.0, "top_k": 0}
    for size in (2, 3, 4):
        done, _ = many(target, own, batch_size=size, **options)
        for name, one in done.items():
            assert one.tokens == alone(target, name, one.seed, **{**options, **own.get(name, {})}), name


def test_tokens_that_pad_are_tokens_of_a_prompt(target: PreTrainedModel) -> None:
    """Hugging Face takes a leading token 0, which pads here, for padding, and its penalties pass it over."""
    options = {"drafter": "none", "repetition_penalty": 1.8, **GREEDY}
    for prompt in ([0, 1], [0, 0, 5], [0]):
        ids = torch.tensor([prompt])
        wanted = polydraft.generate(target, ids, attention_mask=torch.ones_like(ids), **options).sequences
        (found,) = polydraft.generate_many(target, [prompt], **options)
        assert [*prompt, *found.tokens] == wanted[0].tolist()


# Drafters that share the target's keys, bring riders, or read hidden states.


@dataclass(frozen=True, eq=False)
class Sharing(Drafter):
    """Drafts with the target's first layers over the target's own keys."""

    name = "sharing"
    needs = Needs(target=True)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> None: ...

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        assert request.target is not None
        view = request.target.viewed(request.target.model.variant(layers=LayerSet(exit=2))).at(text)

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            return whole_row(view.grow(text, frontier), SamplingParams())

        return grow(text.last(), policy, scheme, propose, noise), state

    def commit(self, state: None, step: Step) -> None: ...


def test_a_drafter_that_shares_goes_on_when_another_text_takes_a_row(target: PreTrainedModel) -> None:
    wanted, own = plain(target), {"three": {"drafter": "none"}, "four": {"drafter": "none"}}
    for size in (2, 3, 4):
        done, failure = many(target, own, batch_size=size, drafter=Sharing(), policy=3, **GREEDY)
        assert not failure and {name: one.tokens for name, one in done.items()} == wanted
        assert done["one"].accepted and done["two"].accepted


@dataclass(frozen=True, eq=False)
class Riding(Drafter):
    """Drafts nothing that is any good, and brings riders, which it is told of and nobody else's."""

    count: int
    name = "riding"

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Needs(riders=self.count)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> None: ...

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        text = request.text
        draft = given_chain(text, [np.array([1])] * len(text.counts))
        batch, nodes, count = len(text.counts), 2, self.count
        ones = torch.ones(batch, count, dtype=torch.int64)
        return replace(draft, riders=Riders(ones, ones, torch.ones(batch, count, nodes + count) > 0, ones > 0)), None

    def commit(self, state: None, step: Step) -> None:
        assert step.scored.riders is not None and step.scored.riders.shape[1] == self.count


def test_riders_of_one_text_have_room_beside_the_trees_of_another(target: PreTrainedModel, model: ModelDrafter) -> None:
    own = {"one": {"drafter": Riding(10), "policy": 1}, "two": {"drafter": Riding(3), "policy": 1}}
    done, failure = many(target, own, batch_size=4, drafter=model, policy="4,3,3", **GREEDY)
    assert not failure and {name: one.tokens for name, one in done.items()} == plain(target)


def test_a_text_that_leaves_its_neighbours_no_room_is_refused(target: PreTrainedModel) -> None:
    wrapped, rule, law = HuggingFaceModel(target), TopDown(NaiveMatch(Given())), TargetLaw(SamplingParams())
    way = Method(NoDraft(), rule, Chain(1))
    wide = replace(way, drafter=Riding(20))
    batch = RunningBatch(wrapped, way, 3, 20 + 2 + 1 + 12, fixed=SamplingParams())
    batch.join(Request("long", torch.tensor([3, 1]), law, Ending(20), Noise.from_seed(0, 1)))
    request = Request("wide", torch.tensor([3, 1]), law, Ending(5), Noise.from_seed(0, 1), wide)
    with pytest.raises(ContextOverflow, match="needs 43 key slots, but this batch has 35"):
        batch.join(request)
    batch.join(replace(request, method=replace(way, drafter=Riding(12))))
    with pytest.raises(ContextOverflow, match="needs 36 key slots, but this batch has 35"):
        batch.join(replace(request, name="longer", method=None, ending=Ending(21)))
    for _ in range(20):
        batch.step()
    assert not batch.running


@dataclass(frozen=True, eq=False)
class Seen:
    """The hidden states of each row's tokens, by their places."""

    rows: tuple[dict[int, Any], ...] = per_row(
        lambda known, length: {place: one for place, one in known.items() if place < length}
    )


@dataclass(eq=False)
class Reading(Drafter):
    """Keeps the hidden states of its texts, and requires those of all tokens but the last whenever it drafts."""

    target: PreTrainedModel
    needs: Needs = Needs((1, "final"))
    drafted: int = 0
    missed: list[int] = field(default_factory=list)
    name = "reading"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Any:
        return Seen(tuple({} for _ in text.counts))

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        return state if features is None else self._noted(state, features)

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        text, policy = request.text, request.policy
        for row, (count, known) in enumerate(zip(text.counts, state.rows, strict=True)):
            if count == 1:  # nothing is read of a text of one token; a row without a text looks like one
                continue
            self.drafted += 1
            self.missed += [place for place in range(count - 1) if place not in known]
            hidden = self.target(text.tokens[row : row + 1, :count], output_hidden_states=True).hidden_states
            for layer, states in {1: hidden[1], "final": hidden[-1]}.items():
                ours = torch.stack([known[place][layer] for place in sorted(known)])
                torch.testing.assert_close(ours, states[0, sorted(known)])
        return given_chain(text, [(np.arange(policy.shape.depth) + count) % VOCAB for count in text.counts]), state

    def commit(self, state: Any, step: Step) -> Any:
        return self._noted(state, step.features)

    def _noted(self, state: Any, features: Features) -> Any:
        after = [dict(one) for one in state.rows]
        for row, column in (features.places >= 0).nonzero().tolist():
            states = {layer: found[row, column] for layer, found in features.states.items()}
            after[row][int(features.places[row, column])] = states
        return Seen(tuple(after))


@pytest.mark.long(1)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("lookups", [False, True])
def test_states_of_all_tokens_are_handed_out_also_of_those_that_others_drafted(
    lookups: bool, size: int, target: PreTrainedModel
) -> None:
    reading = Reading(target)
    drafter = LookupFirst(reading, 1) if lookups else reading
    options = {"policy": 3, "max_new_tokens": 60, "temperature": 1.0, "top_k": 0, "verifier": SharedNoise(Given())}
    done, failure = many(target, {"four": {"drafter": "none"}}, batch_size=size, drafter=drafter, **options)
    assert not failure and reading.drafted > 10 and not reading.missed
    assert sum(one.accepted for one in done.values()) > 0


class Turns(Planner):
    """Begins with a plain step and then drafts in every second."""

    def texts_opened(self, *_: Any) -> None:
        self.current = 0

    def learn(self, *_: Any) -> None:
        self.steps += 1
        self.current = self.steps % 2


def test_states_of_the_prompt_are_handed_out_also_before_a_plain_step(target: PreTrainedModel) -> None:
    reading, ids = Reading(target), torch.tensor([PROMPTS["one"]])
    options = {"verifier": SharedNoise(Given()), "policy": Turns((Chain(2),)), "temperature": 1.0}
    found = polydraft.generate(target, ids, drafter=reading, max_new_tokens=9, **options)
    assert not found.statistics.fallback and reading.drafted > 2 and not reading.missed


# Drafters that fail, and what is checked of a draft.


def test_a_past_may_be_longer_than_the_room_of_the_next_text(target: PreTrainedModel, model: ModelDrafter) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    for drafter in (model, LookupFirst(model)):
        options = {"drafter": drafter, "policy": 2, "do_sample": False}
        first = polydraft.generate(target, ids, keep_past=True, max_new_tokens=60, **options)
        with_past = polydraft.generate(target, ids[:, :6], past=first.past, max_new_tokens=5, **options)
        without = polydraft.generate(target, ids[:, :6], max_new_tokens=5, **options)
        assert not with_past.statistics.fallback and with_past.statistics.prompt_known == 5
        assert torch.equal(with_past.sequences, without.sequences)
        assert with_past.statistics.accepted == without.statistics.accepted


class Unusable(Toy):
    """Has no law for texts that begin with a certain token."""

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any, starts: Tensor, **_: Any) -> Forward:
        found = super().forward(tokens, positions, mask, cache, starts)
        return Forward(found.logits.masked_fill((cache.slots[0, :, 0] == 2).view(-1, 1, 1), torch.nan), {})


def test_a_batch_goes_on_when_a_text_without_a_law_has_left() -> None:
    params = SamplingParams()
    way = Method(NoDraft(), TopDown(NaiveMatch()), Chain(1))
    batch = RunningBatch(Unusable(), way, 2, capacity_for(way, [Ending(12)]), fixed=params)
    good = Request("good", torch.tensor([1, 0]), TargetLaw(params), Ending(8), Noise.from_seed(0, 1))
    batch.join(good)
    batch.join(replace(good, name="bad", tokens=torch.tensor([2, 0])))
    with pytest.raises(InvalidProbabilities, match="nan"):
        batch.step()
    batch.leave("bad")
    while batch.running:
        batch.step()
        batch.sweep()
    assert batch.batch.text.counts[0] == 8


@dataclass(frozen=True)
class Beginnings:
    """The first token of each text."""

    tokens: tuple[int, ...] = per_row()


@dataclass
class Once(Drafter):
    """Raises when it is asked about one of its texts."""

    failing: int
    name = "once"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Beginnings:
        return Beginnings(tuple(text.tokens[:, 0].tolist()))

    def draft(self, state: Beginnings, request: DraftRequest) -> tuple[Draft, Beginnings]:
        if self.failing in state.tokens:
            raise RuntimeError("not this one")
        return Draft.nothing(request.text.last()), state

    def commit(self, state: Beginnings, step: Step) -> Beginnings:
        return state


def test_a_failure_is_not_forgotten_because_another_text_of_the_drafter_goes_on(target: PreTrainedModel) -> None:
    """With settings of their own, the texts are drafted for one by one, by one drafter."""
    own = {"two": {"temperature": 0.5}, "three": {"temperature": 0.4}, "four": {"temperature": 0.3}}
    options = {"max_new_tokens": 4, "temperature": 1.0, "verifier": TopDown(NaiveMatch(Given())), "policy": 1}
    for failing in PROMPTS.values():
        with pytest.warns(RuntimeWarning, match="not this one") as caught:
            _, failure = many(target, own, batch_size=4, drafter=Once(failing[0]), **options)
        assert failure == "RuntimeError: not this one" and len(caught) == 1


def test_a_failure_in_a_step_that_is_taken_again_is_forgotten_if_it_works() -> None:
    """What failed is told with the step: nobody is warned of one that was not kept."""
    drafter, text, law = Once(1), Text(torch.tensor([[1]]), torch.tensor([1])), TargetLaw(SamplingParams())
    method = Method(drafter, TopDown(NaiveMatch(Given())), Chain(1))
    observer, statistics = Observer(Toy()), Statistics()
    batch = begin(Toy(), method, Prompts(text, (law,), (Ending(9),), Noise.from_seed(0, 1)))
    failed, lost, _ = step(batch)
    (fault,) = lost.faults
    assert fault.reason == failed.parts[0].fault == "RuntimeError: not this one" and fault.method is method
    drafter.failing = 0
    after, block, _ = step(batch)
    observer.note(block, statistics)
    assert not (block.faults or after.parts[0].fault or observer.failure or statistics.fallback)
    assert block.rows[0].tokens == lost.rows[0].tokens
    with pytest.warns(RuntimeWarning, match="not this one"):
        observer.note(lost, statistics)
    assert observer.failure == statistics.fallback == fault.reason


def test_what_fails_as_a_text_begins_is_told_once_with_its_first_step() -> None:
    class Unready(Once):
        def start(self, text: Text, session: Session) -> Beginnings:
            raise RuntimeError("not yet")

    text, law = Text(torch.tensor([[1]]), torch.tensor([1])), TargetLaw(SamplingParams())
    method = Method(Unready(0), TopDown(NaiveMatch(Given())), Chain(1))
    batch = begin(Toy(), method, Prompts(text, (law,), (Ending(9),), Noise.from_seed(0, 1)))
    told = list[list[str]]()
    while batch.going:
        batch, block, _ = step(batch)
        told.append([fault.reason for fault in block.faults])
    assert told == [["RuntimeError: not yet"], *[[]] * 7]


def test_drafts_behind_one_that_is_not_there_are_refused() -> None:
    """Rules take the drafts up to the first absent one: what comes behind would bias the text."""
    text, rows = Text(torch.tensor([[0]]), torch.tensor([1])), torch.full((1, 1, 3), 1 / 3)

    def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
        width = frontier.tokens.shape[1]
        return torch.arange(3).expand(1, width, 3), rows.expand(1, width, 3)

    for scheme in (IID(), TopK()):
        draft = grow(text.last(), Widths((3,)), scheme, propose, Noise.from_seed(0, 1))
        for there in ([True, True, True, False], [True, False, True, True]):
            valid = torch.tensor([there])
            holed = replace(draft, tree=replace(draft.tree, valid=valid), atoms=draft.atoms.where(valid, -1))
            if there[1] or scheme.deterministic:
                assert checked(holed, text, scheme, Widths((3,)), 3).failure is None
            else:
                with pytest.raises(InvalidDraft, match="iid drafts behind one that is not there"):
                    checked(holed, text, scheme, Widths((3,)), 3)
