"""Texts of one running batch with drafters, verifiers and trees of their own, each the text that it is alone."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from doubles import Unparted, Whole, passes_of, perturbed, tiny_model
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, Completed, ManyRun, ModelDrafter, NgramDrafter, NoDraft, Widths, generate_many
from polydraft.drafters import Drafter, DraftRequest, EnsembleDrafter, LookupFirst, Session
from polydraft.engine import Ending, Method, Planner, Request, RunningBatch, Statistics, TargetLaw
from polydraft.engine.choices import default_verifier
from polydraft.engine.loop.step import capacity_for
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Text
from polydraft.trees import Draft, Pieces
from polydraft.verifiers import BlockVerification, RecursiveRejection, SpeculativeSampling, TopDown

VOCAB, NEW = 24, 12
PROMPTS: dict[Hashable, list[int]] = {
    "plain": [3, 1, 4, 1, 5],
    "looked up": [5, 8, 5, 8, 5, 8, 5],
    "drafted": [7],
    "either": [9, 2, 6, 9, 2, 6, 9, 2],
    "both": [2, 7, 1, 8],
    "a tree": [6, 6],
    "as usual": [1, 6, 1, 8, 2, 3, 3, 9, 8, 8, 7, 4, 9],
    "last": [4, 4, 4, 4],
}


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.05)


def model() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(draft()))


def ensemble() -> EnsembleDrafter:
    members = HuggingFaceModel(draft()), HuggingFaceModel(perturbed(target(), 0.1))
    return EnsembleDrafter(((members[0], None), (members[1], SamplingParams(temperature=0.5))))


OWN: dict[Hashable, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "looked up": {"drafter": NgramDrafter(), "policy": Chain(4)},
    "either": {"drafter": LookupFirst(model(), 1), "policy": Widths((2, 1, 1)), "verifier": RecursiveRejection()},
    "both": {"drafter": ensemble(), "policy": Widths((2, 1))},
    "a tree": {"policy": "2,2", "verifier": TopDown(RecursiveRejection())},
    "last": {"drafter": draft(), "policy": [1, 1]},
}


def settings(heat: float) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "temperature": heat, **({"top_k": 0} if heat else {})}


def common(heat: float) -> dict[str, Any]:
    return {"drafter": model(), "policy": Chain(3), **settings(heat)}


def many(names: Mapping[Hashable, object], per_prompt: Mapping[Any, dict[str, Any]], **options: Any) -> ManyRun:
    chosen = {name: torch.tensor(PROMPTS[name]) for name in names}
    return generate_many(target(), chosen, per_prompt=per_prompt, **{"seed": 5, **options})


def alone(name: Hashable, seed: int, **options: Any) -> tuple[list[int], int, int]:
    """Return the text that a prompt gets by itself, the steps that it takes, and how much of it was drafted."""
    prompt = torch.tensor([PROMPTS[name]])
    run = polydraft.stream(target(), prompt, attention_mask=torch.ones_like(prompt), seed=seed, **options).exhaust()
    return run.new_tokens[0], run.statistics.steps, run.statistics.accepted


def found(one: Completed) -> tuple[list[int], int, int]:
    return one.tokens, one.target_calls, one.accepted


# Drafters, verifiers and trees of single prompts.


@pytest.mark.long(2)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 3, len(PROMPTS)])
def test_every_row_is_drafted_and_verified_as_it_is_alone(size: int, heat: float) -> None:
    done = {one.name: one for one in many(PROMPTS, OWN, batch_size=size, **common(heat))}
    assert done.keys() == PROMPTS.keys()
    for name, one in done.items():
        assert found(one) == alone(name, one.seed, **{**common(heat), **OWN.get(name, {})}), name
    drafted = [name for name, one in done.items() if one.accepted]
    assert done["plain"].target_calls == NEW and done["plain"].accepted == 0
    assert {"drafted", "either", "both", "a tree", "as usual"} <= {*drafted}


def test_a_verifier_of_ones_own_makes_another_text_of_the_same_seed() -> None:
    """The comparison with the text alone would prove nothing if all rules wrote the same."""
    rules = {"block": BlockVerification(), "top down": TopDown(RecursiveRejection()), "naive": "naive"}
    texts = {name: alone("as usual", 1, **{**common(1.0), "verifier": rule})[0] for name, rule in rules.items()}
    assert len({*map(tuple, texts.values())}) > 1
    seeded = {"as usual": {"seed": 1, "verifier": rules["top down"]}, "both": {"seed": 1}}
    done = {one.name: one for one in many({"as usual": 0, "both": 0}, seeded, **common(1.0))}
    assert done["as usual"].tokens == texts["top down"]


def test_options_and_drafters_of_one_prompt_go_together() -> None:
    own = {
        "both": {"drafter": draft(), "temperature": 0.0, "max_new_tokens": 20, "seed": 9},
        "plain": {"drafter": "none", "repetition_penalty": 1.5},
    }
    done = {one.name: one for one in many({"both": 0, "plain": 0, "last": 0}, own, drafter="ngram", **settings(1.0))}
    cold = {"drafter": draft(), "max_new_tokens": 20, "temperature": 0.0}
    assert found(done["both"]) == alone("both", 9, **cold) and len(done["both"].tokens) == 20
    penalised = {"drafter": "none", "repetition_penalty": 1.5, **settings(1.0)}
    assert found(done["plain"]) == alone("plain", done["plain"].seed, **penalised)
    assert found(done["last"]) == alone("last", done["last"].seed, drafter="ngram", **settings(1.0))


def test_prompts_that_name_the_same_share_their_passes() -> None:
    own = {"drafter": model(), "policy": Chain(2)}
    names = {"drafted": own, "both": {**own}, "last": {**own, "policy": Chain(3)}}
    options = {"drafter": "none", "batch_size": 3, **settings(0.0)}
    with passes_of(draft()) as together:
        done = list(many(names, names, **options))
    with passes_of(draft()) as apart:
        for name in names:
            list(many({name: 0}, {name: names[name]}, **options))
    assert len(done) == 3 and all(one.accepted for one in done)
    assert {rows for rows, _ in together} == {1, 2} and {rows for rows, _ in apart} == {1}
    assert len(together) < len(apart)


def test_what_cannot_be_one_prompts_own_is_refused_by_name() -> None:
    planner = Planner((Widths((2, 1)), Chain(1)))
    with pytest.raises(InvalidParameter, match="Prompt 'both' has a planner of its own; give it as policy for all"):
        many(PROMPTS, {"both": {"policy": planner}}, **common(0.0))
    with pytest.raises(InvalidParameter, match="Prompt 'both' has a drafter of its own, for which the planner of all"):
        many(PROMPTS, {"both": {"drafter": "none"}}, **{**common(0.0), "policy": planner})
    with pytest.raises(UnpairedScheme, match="works with drafts that are"):
        many(PROMPTS, {"both": {"drafter": NgramDrafter(), "verifier": RecursiveRejection()}}, **common(0.0))
    chains = {"verifier": SpeculativeSampling(), "policy": Widths((2,))}
    with pytest.raises(UnpairedScheme, match="verifies one draft per node, but the tree has 2"):
        list(many(PROMPTS, {"both": chains}, **common(1.0)))
    with pytest.raises(
        InvalidParameter,
        match=r"drafter must be a drafter, whose class derives from polydraft\.Drafter and has a name, a draft model",
    ):
        many(PROMPTS, {"both": {"drafter": 3}}, **common(0.0))
    with pytest.raises(InvalidParameter, match="The drafter route-first needs a draft model"):
        many(PROMPTS, {"both": {"drafter": "route-first"}}, **common(0.0))
    with pytest.raises(InvalidParameter, match="The drafter recycling takes nothing behind a colon"):
        many(PROMPTS, {"both": {"drafter": "recycling:3"}}, **common(0.0))


def test_a_planner_for_all_prompts_plans_beside_drafters_of_single_ones() -> None:
    planner = Planner((Widths((2, 1)), Chain(1)))
    options = {**common(0.0), "policy": planner}
    own = {"plain": {"drafter": "none", "policy": 1}, **{name: OWN[name] for name in ("looked up", "either", "last")}}
    done = {one.name: one for one in many(PROMPTS, own, **options)}
    for name, one in done.items():
        assert one.tokens == alone(name, 0, drafter="none", **settings(0.0))[0]
    assert planner.steps > 0


def test_a_prompt_that_is_too_long_is_refused_whoever_was_to_draft_for_it() -> None:
    own = {"as usual": {"drafter": "none", "temperature": 0.5}, "both": {"drafter": "none", "temperature": 0.5}}
    given = {"drafter": "ngram", "max_length": 8, "temperature": 1.0, "top_k": 0}
    done = {one.name: one for one in many({"as usual": 0, "both": 0}, own, **given)}
    assert (done["as usual"].finish, done["both"].finish) == ("refused", "length")
    assert len(done["both"].tokens) == 4


# Drafters that fail.


class Failing(Unparted):
    """A model drafter that fails once, in a text that has become so long; it notes how many rows it drafts for."""

    def __init__(self, at: int, failures: int = 1) -> None:
        super().__init__(model())
        self.at, self.failures, self.drafted = at, failures, list[int]()
        self.name = "failing"

    def draft(self, state: Whole, request: DraftRequest) -> tuple[Draft | Pieces, Whole]:
        text = request.text
        if self.failures and max(text.counts) >= self.at:
            self.failures -= 1
            raise RuntimeError("out of pencils")
        self.drafted.append(len(text.counts))
        return super().draft(state, request)


FALLBACK = "RuntimeError: out of pencils"


def with_failing(drafter: Failing, size: int, heat: float) -> tuple[dict[Hashable, Completed], str]:
    """Write five texts, two of them with this drafter: one at once, one when another text has ended."""
    own = {"plain": {"drafter": drafter, "policy": Chain(3)}, "last": {"drafter": drafter, "policy": Chain(3)}}
    names = ("plain", "either", "both", "a tree", "last")
    run = many(dict.fromkeys(names), {name: {**OWN, **own}[name] for name in names}, batch_size=size, **common(heat))
    return {one.name: one for one in run}, run.statistics.fallback


@pytest.mark.long(2)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("size", [2, 3])
def test_a_drafter_that_fails_costs_its_own_rows_their_drafts_and_later_ones_none(size: int, heat: float) -> None:
    good, reason = with_failing(Failing(0, failures=0), size, heat)
    assert reason == ""
    drafter = Failing(len(PROMPTS["plain"]) + 3)
    with pytest.warns(RuntimeWarning, match="The failing drafter failed") as caught:
        failed, reason = with_failing(drafter, size, heat)
    assert len(caught) == 1 and reason == FALLBACK and drafter.failures == 0
    assert failed.keys() == good.keys() and good["plain"].accepted > failed["plain"].accepted
    assert failed["plain"].target_calls > good["plain"].target_calls
    for name in failed.keys() - {"plain"}:
        assert failed[name] == good[name], name
    assert failed["last"].accepted > 0
    assert heat or failed["plain"].tokens == good["plain"].tokens


def test_all_rows_of_the_part_that_failed_are_decoded_plainly_and_later_texts_have_a_part_together() -> None:
    names, drafter = {"plain": 0, "both": 0, "last": 0, "a tree": 0, "drafted": 0}, Failing(8)
    options = {**common(0.0), "drafter": drafter, "batch_size": 2}
    with pytest.warns(RuntimeWarning, match="The failing drafter failed"):
        run = many(names, {}, **options)
        done = {one.name: one for one in run}
    assert run.statistics.fallback == FALLBACK
    for name, one in done.items():
        assert one.tokens == alone(name, 0, drafter="none", **settings(0.0))[0]
    usual = {name: alone(name, 0, **common(0.0)) for name in names}
    assert done["plain"].accepted < usual["plain"][2] and done["both"].accepted < usual["both"][2]
    assert all(found(done[name]) == usual[name] for name in ("last", "a tree", "drafted"))
    assert drafter.drafted[-1] in (1, 2) and {1, 2} <= {*drafter.drafted}


def test_a_drafter_that_fails_twice_is_warned_about_once_and_named() -> None:
    drafter = Failing(6, failures=2)
    with pytest.warns(RuntimeWarning) as caught:
        run = many(PROMPTS, {}, **{**common(0.0), "drafter": drafter, "batch_size": 2})
        done = list(run)
    assert [str(one.message) for one in caught] == [
        f"The failing drafter failed ({FALLBACK}); the rest is decoded without drafts."
    ]
    assert run.statistics.fallback == FALLBACK and drafter.failures == 0
    for one in done:
        assert one.tokens == alone(one.name, 0, drafter="none", **settings(0.0))[0]


# Prompts that are read in chunks.

LONG = [1, 6, 1, 8, 2, 3, 3, 9, 8, 8, 7, 4, 9, 1, 6, 1, 8]
DRAFTERS = {"none": NoDraft, "n-gram": NgramDrafter, "model": model, "lookup": lambda: LookupFirst(model(), 1)}


def method(drafter: Drafter, heat: float) -> Method:
    rule = default_verifier(drafter, SamplingParams(temperature=heat))
    return Method(drafter, rule, Chain(3))


def request(name: str, tokens: list[int], heat: float, own: Method | None = None) -> Request:
    law = TargetLaw(SamplingParams(temperature=heat))
    return Request(name, torch.tensor(tokens), law, Ending(len(tokens) + NEW), Noise.from_seed(3, 1), own)


def opened(drafter: Drafter, heat: float, chunk: int | None, size: int = 3) -> RunningBatch:
    way, fixed = method(drafter, heat), SamplingParams(temperature=heat)
    capacity = capacity_for(way, [Ending(len(LONG) + NEW)])
    return RunningBatch(HuggingFaceModel(target()), way, size, capacity, fixed=fixed, chunk=chunk)


def texts_of(batch: RunningBatch, steps: int = 100) -> dict[Hashable, list[int]]:
    """Step until all texts have ended, or so often; return what each gained."""
    texts: dict[Hashable, list[int]] = {}
    for _ in range(steps):
        if found := batch.step():
            batch.observer.note(found.block, Statistics())
            for name, gained in found.gains().items():
                texts.setdefault(name, []).extend(gained.tokens)
        batch.sweep()
        if not (batch.running or batch.reading):
            break
    return texts


def names(requests: Iterable[Request | None]) -> list[Hashable]:
    return [None if one is None else one.name for one in requests]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_long_prompt_is_read_between_the_steps_of_other_texts(name: str, heat: float) -> None:
    batch, whole = (opened(DRAFTERS[name](), heat, chunk) for chunk in (3, None))
    for one in (batch, whole):
        one.join(request("short", [7, 2], heat))
    first = texts_of(batch, 1)
    for one in (batch, whole):
        one.join(request("long", LONG, heat))
    assert names(batch.texts) == ["short", None, None] and names(whole.texts) == ["short", "long", None]
    assert (names(batch.reading), batch.free, batch.joined) == (["long"], 1, 2) and not whole.reading
    chunks = -(-(len(LONG) - 1) // 3)
    with passes_of(target()) as seen:
        for step in range(1, chunks + 1):
            for owner, tokens in texts_of(batch, 1).items():
                first.setdefault(owner, []).extend(tokens)
            assert names(batch.reading) == (["long"] if step < chunks else [])
            assert ("long" in first) == (step == chunks)
    alone_passes = [width for rows, width in seen if rows == 1]
    assert alone_passes == [3] * (chunks - 1) + [(len(LONG) - 1) - 3 * (chunks - 1)]
    assert len(first["short"]) >= chunks + 1 or len(first["short"]) == NEW
    for owner, tokens in texts_of(batch).items():
        first[owner] += tokens
    assert first == texts_of(whole)
    assert {owner: len(tokens) for owner, tokens in first.items()} == {"short": NEW, "long": NEW}


def test_prompts_take_turns_and_may_have_drafters_of_their_own() -> None:
    prompts = {"one": LONG, "two": LONG[::-1], "three": LONG[3:]}
    others = {"one": None, "two": method(NoDraft(), 1.0), "three": method(LookupFirst(model(), 1), 1.0)}
    texts = []
    for chunk in (3, None):
        batch = opened(model(), 1.0, chunk)
        for name, tokens in prompts.items():
            batch.join(request(name, tokens, 1.0, others[name]))
        assert names(batch.reading) == ([*prompts] if chunk else []) and batch.free == 0
        if chunk:
            assert batch.step() is None and names(batch.reading) == ["two", "three", "one"]
            assert [batch.step() for _ in range(2)] == [None] * 2 and names(batch.reading) == [*prompts]
        texts.append(texts_of(batch))
    assert texts[0] == texts[1] and texts[0].keys() == prompts.keys()


def test_a_text_may_leave_while_its_prompt_is_read() -> None:
    batch = opened(model(), 0.0, 3, size=2)
    batch.join(request("short", [7, 2], 0.0))
    batch.join(request("long", LONG, 0.0))
    batch.step()
    assert names(batch.reading) == ["long"]
    batch.leave("long")
    assert (batch.reading, batch.free) == ((), 1)
    batch.join(request("again", LONG, 0.0))
    whole = opened(model(), 0.0, None, size=1)
    whole.join(request("again", LONG, 0.0))
    assert texts_of(batch)["again"] == texts_of(whole)["again"]


def test_a_drafter_that_fails_while_it_reads_a_prompt_costs_only_that_text_its_drafts() -> None:
    class Unread(Failing):
        def read(self, state: Whole, text: Text, features: Features | None) -> Whole:
            if text.counts[0] > 8:
                raise RuntimeError("out of pencils")
            return super().read(state, text, features)

    failing, prompts = Unread(0, failures=0), {"short": PROMPTS["drafted"], "long": LONG, "brief": LONG[:8]}
    batch, plain, own = opened(model(), 0.0, 3), opened(NoDraft(), 0.0, 3), method(failing, 0.0)
    for name, tokens in prompts.items():
        batch.join(request(name, tokens, 0.0, None if name == "short" else own))
        plain.join(request(name, tokens, 0.0))
    with pytest.warns(RuntimeWarning, match="The failing drafter failed") as caught:
        texts = texts_of(batch)
    assert texts == texts_of(plain) and texts["short"] == alone("drafted", 3, **common(0.0))[0]
    assert len(caught) == 1 and batch.observer.failure == FALLBACK
    assert {*failing.drafted} == {1}, "it drafts on for the text whose prompt it could read"


@dataclass(frozen=True)
class Crowded(Whole):
    """A state beside whose rows no other text's can be put."""

    def put(self, row: int, other: Whole) -> Whole:
        raise RuntimeError("out of chairs")


class Solitary(Unparted):
    """A model drafter that drafts for every text by itself, since its states cannot be put together."""

    def __init__(self) -> None:
        super().__init__(model())
        self.drafted = list[int]()

    def start(self, text: Text, session: Session) -> Whole:
        return Crowded(super().start(text, session).inner)

    def draft(self, state: Whole, request: DraftRequest) -> tuple[Draft | Pieces, Whole]:
        text = request.text
        self.drafted.append(len(text.counts))
        return super().draft(state, request)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_an_error_while_a_text_joins_costs_nobody_a_draft(heat: float) -> None:
    """The text is drafted for by itself, and there is nothing to warn of."""
    drafter, rule = Solitary(), default_verifier(model(), SamplingParams(temperature=heat))
    options = {**common(heat), "batch_size": 3, "verifier": rule}
    run = many(PROMPTS, {}, **{**options, "drafter": drafter})
    together = {one.name: found(one) for one in many(PROMPTS, {}, **options)}
    assert {one.name: found(one) for one in run} == together
    assert not run.statistics.fallback and {*drafter.drafted} == {1}
