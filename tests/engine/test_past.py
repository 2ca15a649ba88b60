"""A run that goes on from the past of another: it reads only what is new, and writes the text of a fresh call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
from doubles import passes_of, perturbed, tiny_model
from heads import IN_PLACE, adapter_drafter, block_drafter, every_head
from torch import Tensor, nn
from transformers import PreTrainedModel

import polydraft
from polydraft import (
    Chain,
    JacobiDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    Past,
    Run,
    Widths,
)
from polydraft.drafters import (
    Drafter,
    DraftRequest,
    EnsembleDrafter,
    LookupFirst,
    MergedDrafter,
    RecyclingDrafter,
    RoutedDrafter,
    Session,
    resumed,
)
from polydraft.drafters.model import ModelDraftState
from polydraft.engine import Planner
from polydraft.errors import InvalidParameter
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.trees import TreePolicy
from polydraft.trees.growing import BestFirst
from polydraft.verifiers import RecursiveRejection, TopDown

VOCAB, NEW = 24, 12
PROMPT = [5, 8, 5, 8, 5, 8, 5]
QUESTION = [3, 1, 4, 1, 5]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, max_position_embeddings=96)


@cache
def draft_of(scale: float) -> PreTrainedModel:
    return perturbed(target(), scale)


def draft(scale: float = 0.05) -> PreTrainedModel:
    return draft_of(scale)


def model(scale: float = 0.05) -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(draft(scale)))


def ensemble() -> EnsembleDrafter:
    members = HuggingFaceModel(draft()), HuggingFaceModel(draft(0.1))
    return EnsembleDrafter(((members[0], None), (members[1], SamplingParams(temperature=0.5))))


@cache
def ouroboros() -> OuroborosDrafter:
    return OuroborosDrafter(HuggingFaceModel(draft()), 2, 2, 3, 3, 2)


@cache
def head(name: str) -> Drafter:
    return block_drafter(name) if name in IN_PLACE else every_head()[name]


@dataclass(frozen=True)
class Case:
    """A way to decode, with what is told to `stream`."""

    drafter: Callable[[], Drafter]
    policy: Callable[[], TreePolicy]
    temperature: float
    others: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        heat = {"temperature": self.temperature, **({"top_k": 0} if self.temperature else {})}
        return {"drafter": self.drafter(), "policy": self.policy(), "max_new_tokens": NEW, **heat, **self.others}


CASES = {
    "plain, greedy": Case(NoDraft, partial(Chain, 1), 0),
    "plain, sampled": Case(NoDraft, partial(Chain, 1), 0.9),
    "n-gram, greedy": Case(NgramDrafter, partial(Chain, 4), 0),
    "n-gram, sampled": Case(NgramDrafter, partial(Chain, 4), 0.9),
    "adapter": Case(cache(adapter_drafter), partial(Widths, (2, 1)), 0.9),
    "jacobi": Case(JacobiDrafter, partial(Chain, 4), 0.9),
    "lookahead": Case(partial(LookaheadDrafter, 3, 3, 2, True), partial(Widths, (2, 1)), 0.9),
    "ouroboros": Case(ouroboros, partial(Widths, (2, 1, 1, 1)), 0.9),
    "model, greedy tree": Case(model, partial(Widths, (2, 2, 1)), 0),
    "model, greedy chain": Case(model, partial(Chain, 3), 0),
    "model, sampled chain": Case(model, partial(Chain, 3), 0.9),
    "model, sampled tree": Case(model, partial(Widths, (2, 1)), 0.9),
    "model, dynamic": Case(model, partial(BestFirst, 6, 3, 3), 0.9, {"verifier": TopDown(RecursiveRejection())}),
    "model, penalised": Case(model, partial(Chain, 3), 0.9, {"repetition_penalty": 1.3}),
    "ensemble, greedy": Case(ensemble, partial(Widths, (2, 1)), 0),
    "ensemble, sampled": Case(ensemble, partial(Widths, (2, 1)), 0.9),
    **{f"{name}, greedy": Case(partial(head, name), partial(Widths, (2, 2, 1)), 0) for name in every_head()},
    **{f"{name}, sampled": Case(partial(head, name), partial(Chain, 3), 0.9) for name in (*every_head(), *IN_PLACE)},
    "lookup before a head": Case(lambda: LookupFirst(head("a block head"), 1), partial(Widths, (2, 1, 1)), 0),
    "lookup, greedy": Case(lambda: LookupFirst(model(), 1), partial(Widths, (2, 1, 1)), 0),
    "lookup, sampled": Case(lambda: LookupFirst(model(), 1), partial(Chain, 3), 0.9),
    "recycling": Case(RecyclingDrafter, partial(Chain, 4), 0.9),
    "route": Case(lambda: RoutedDrafter((NgramDrafter(), RecyclingDrafter())), partial(Chain, 4), 0.9),
    "route before a model": Case(lambda: RoutedDrafter((NgramDrafter(),), model()), partial(Chain, 4), 0.9),
    "merge": Case(lambda: MergedDrafter((NgramDrafter(), RecyclingDrafter())), partial(Widths, (2, 1)), 0.9),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
PARTS = ("plain, sampled", "model, greedy tree", "model, sampled chain", "lookup, greedy")
some_cases = pytest.mark.parametrize("case", [CASES[name] for name in PARTS], ids=PARTS)


def prompt(*tokens: int) -> dict[str, Tensor]:
    """Return a prompt with its mask: token 0 pads, and would be left out where nothing is said."""
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(case: Case, *tokens: int, seed: int = 4, **others: Any) -> Run:
    return polydraft.stream(target(), prompt(*tokens), **{**case.options(), "seed": seed, **others})


def first_turn(case: Case) -> tuple[list[int], Past]:
    """Return the text of a first turn and its past."""
    first = run(case, *PROMPT, keep_past=True).exhaust()
    assert first.over and len(first.new_tokens[0]) == NEW and first.past is not None
    return [*PROMPT, *first.new_tokens[0]], first.past


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Count the tokens of every forward pass."""
    seen: list[int] = []
    with passes_of(model, lambda shape: seen.append(shape[1])):
        yield seen


@pytest.mark.long(5)
@every_case
def test_a_second_turn_is_the_text_of_a_fresh_call_and_reads_only_what_is_new(case: Case) -> None:
    text, past = first_turn(case)
    asked = [*text, *QUESTION]
    fresh = run(case, *asked, seed=5).exhaust()
    with counted(target()) as seen:
        second = run(case, *asked, seed=5, past=past)
        blocks = list(second)
    assert second.new_tokens == fresh.new_tokens
    assert second.statistics.accepted == fresh.statistics.accepted
    found = second.statistics
    assert (found.prompt_read, found.prompt_known) == (len(QUESTION) + 1, len(text) - 1)
    scored = found.prompt_read - 1 + sum(block.tree.tokens.shape[1] for block in blocks)
    assert (
        sum(seen) == scored + 1 if not case.drafter().needs.riders else sum(seen) > scored + 1
    )  # riders are in no tree
    assert (fresh.statistics.prompt_read, fresh.statistics.prompt_known) == (len(asked), 0)


@pytest.mark.long(4)
@every_case
def test_a_past_may_be_used_twice_and_parts_with_the_text_where_that_is_another(case: Case) -> None:
    text, past = first_turn(case)
    other = [*text[:10], (text[10] + 1) % VOCAB, *QUESTION]
    prompts = {
        "longer": ([*text, 1, 2], len(text) - 1),
        "edited": (other, 10),
        "cut": (text[:9], 8),
        "same": (text, 18),
    }
    for asked, known in [*prompts.values(), prompts["longer"]]:
        second = run(case, *asked, seed=6, past=past).exhaust()
        assert second.new_tokens == run(case, *asked, seed=6).exhaust().new_tokens
        assert second.statistics.prompt_known == min(known, len(asked) - 1 - bool(case.drafter().needs.layers))
        assert second.past is None


@some_cases
def test_nothing_in_common(case: Case) -> None:
    _, past = first_turn(case)
    second = run(case, 7, 7, 7, past=past).exhaust()
    assert second.new_tokens == run(case, 7, 7, 7).exhaust().new_tokens
    assert (second.statistics.prompt_read, second.statistics.prompt_known) == (3, 0)


@some_cases
def test_many_turns(case: Case) -> None:
    text, past = [*PROMPT], None
    for turn in range(4):
        fresh = run(case, *text, seed=turn).exhaust()
        going = run(case, *text, seed=turn, past=past, keep_past=True).exhaust()
        assert going.new_tokens == fresh.new_tokens
        text, past = [*text, *going.new_tokens[0], turn], going.past
    assert past is not None and past.text.tokens.shape == (1, len(text) - 1)


@pytest.mark.long(3)
@pytest.mark.parametrize("steps", [0, pytest.param(1, marks=pytest.mark.slow), 3])
@every_case
def test_a_run_that_was_left_has_the_past_of_what_it_wrote(case: Case, steps: int) -> None:
    going = run(case, *PROMPT, keep_past=True)
    for _ in range(steps):
        next(going)
    past, written = going.past, [*going.new_tokens[0]]
    assert (past is None) == (steps == 0)
    asked = [*PROMPT, *written, *QUESTION]
    second = run(case, *asked, seed=5, past=past).exhaust()
    assert second.new_tokens == run(case, *asked, seed=5).exhaust().new_tokens
    assert second.statistics.prompt_known == (len(PROMPT) + len(written) - 1 if steps else 0)
    assert going.exhaust().new_tokens == run(case, *PROMPT).exhaust().new_tokens
    again = run(case, *asked, seed=5, past=past).exhaust()  # the run that went on has not disturbed its earlier past
    assert again.new_tokens == second.new_tokens


class Interrupt(KeyboardInterrupt):
    """Somebody pressed Ctrl-C."""


@pytest.mark.long(8)
@pytest.mark.parametrize("part", ["draft", "commit", "verify", "keep"])
@some_cases
def test_a_run_that_was_interrupted_has_the_past_of_what_was_complete(case: Case, part: str) -> None:
    going = run(case, *PROMPT, keep_past=True)
    next(going)
    place = {"verify": going.setup.method.verifier, "keep": going._taken.batch.reader.cache}  # type: ignore[union-attr]
    owner = place.get(part, going.setup.method.drafter)
    whole = getattr(owner, part)

    def torn(*arguments: Any) -> None:
        whole(*arguments)
        raise Interrupt

    vars(owner)[part] = torn
    with pytest.raises(Interrupt):
        next(going)
    del vars(owner)[part]
    asked = [*PROMPT, *going.new_tokens[0], *QUESTION]
    second = run(case, *asked, seed=5, past=going.past).exhaust()
    assert second.new_tokens == run(case, *asked, seed=5).exhaust().new_tokens
    assert second.statistics.prompt_known == len(asked) - len(QUESTION) - 1


def test_an_interrupt_before_the_first_step_leaves_the_past_that_was_given() -> None:
    case = CASES["model, greedy tree"]
    text, past = first_turn(case)
    second = run(case, *text, *QUESTION, past=past, keep_past=True)
    assert second.past is past
    assert run(case, *text, *QUESTION, past=past).past is None


@pytest.mark.parametrize("drafter", [model, lambda: LookupFirst(model(), 1), ensemble], ids=["model", "lookup", "many"])
def test_the_draft_model_reads_only_what_is_new(drafter: Callable[[], Drafter]) -> None:
    case = Case(drafter, partial(Chain, 3), 0)
    text, past = first_turn(case)
    with counted(draft()) as seen:
        next(run(case, *text, *QUESTION, past=past))
    assert seen[0] <= len(QUESTION) + 2
    assert sum(seen) < len(text)
    with counted(draft()) as seen:
        next(run(case, *text, *QUESTION))
    assert seen[0] == len(text) + len(QUESTION) - 1


def test_a_draft_model_that_was_not_asked_before_reads_what_it_missed() -> None:
    plain, drafted = CASES["plain, sampled"], CASES["model, sampled chain"]
    text, past = first_turn(plain)
    for case in (drafted, CASES["lookup, sampled"], CASES["ensemble, sampled"]):
        second = run(case, *text, *QUESTION, past=past).exhaust()
        assert second.new_tokens == run(case, *text, *QUESTION).exhaust().new_tokens
        assert second.statistics.accepted > 0


def test_lookups_may_come_and_go_between_turns() -> None:
    text, past = first_turn(CASES["model, greedy chain"])
    first = CASES["lookup, greedy"]
    with counted(draft()) as seen:
        second = run(first, *text, *QUESTION, past=past).exhaust()
    assert second.new_tokens == run(first, *text, *QUESTION).exhaust().new_tokens
    assert max(seen) <= NEW


def test_another_draft_model_reads_everything() -> None:
    text, past = first_turn(CASES["model, greedy chain"])
    other = Case(lambda: model(0.1), partial(Chain, 3), 0)
    fresh = run(other, *text, *QUESTION).exhaust()  # its first use tries the model, whose passes are not counted
    with counted(draft(0.1)) as seen:
        second = run(other, *text, *QUESTION, past=past).exhaust()
    assert second.new_tokens == fresh.new_tokens
    assert seen[0] == len(text) + len(QUESTION) - 1


def test_a_draft_model_that_is_passed_as_it_is_goes_on_too() -> None:
    options: dict[str, Any] = {"drafter": draft(), "max_new_tokens": NEW, "temperature": 0}
    first = polydraft.generate(target(), prompt(*PROMPT), keep_past=True, **options)
    assert isinstance(first, polydraft.GenerationOutput) and "past" in first and first.past is not None
    asked = prompt(*first.sequences[0].tolist(), *QUESTION)
    second = polydraft.generate(target(), asked, past=first.past, **options)
    assert isinstance(second, polydraft.GenerationOutput) and "past" not in second
    assert torch.equal(second.sequences, polydraft.generate(target(), asked, **options).sequences)
    assert second.statistics.prompt_known == first.sequences.shape[1] - 1
    state = first.past.drafts.other
    assert isinstance(state, ModelDraftState)


class Stopping(ModelDrafter):
    """A drafter that fails at its second draft, and says nothing of resuming."""

    def draft(self, state: Any, request: DraftRequest) -> Any:
        if int(request.text.lengths) > len(PROMPT) + 2:
            raise RuntimeError("no more")
        return super().draft(state, request)


def test_a_drafter_that_failed_is_started_anew() -> None:
    case = Case(lambda: Stopping(HuggingFaceModel(draft())), partial(Chain, 1), 0)
    with pytest.warns(RuntimeWarning, match="no more"):
        text, past = first_turn(case)
    good = CASES["model, greedy chain"]
    second = run(good, *text, *QUESTION, past=past).exhaust()
    assert second.new_tokens == run(good, *text, *QUESTION).exhaust().new_tokens
    assert not second.statistics.fallback


def test_a_state_is_started_anew_unless_it_says_itself_that_it_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(torch.tensor([PROMPT]), torch.tensor([len(PROMPT)]))
    session, drafter = Session(SamplingParams(), 40, VOCAB), ModelDrafter(HuggingFaceModel(draft()))
    state = drafter.read(drafter.start(text, session), text, None)
    for says, known in ((True, 5), (False, 0)):
        monkeypatch.setattr(ModelDraftState, "resumes", lambda own, fresh, says=says: says)
        assert state.reader.read == (len(PROMPT) - 1,)
        assert resumed(drafter, state, 5, text, session).reader.read == (known,)
    monkeypatch.delattr(ModelDraftState, "resumes")
    assert resumed(drafter, state, 5, text, session).reader.read == (0,)
    assert state.reader.read == (len(PROMPT) - 1,)


def test_a_planner_goes_on_learning_from_turn_to_turn() -> None:
    planner = Planner((Widths((2, 1)), Chain(1)))
    case = Case(model, lambda: planner, 0)
    text, past, steps = [*PROMPT], None, 0
    for _ in range(3):
        going = run(case, *text, past=past, keep_past=True)
        blocks = [*going]
        assert going.new_tokens == run(CASES["plain, greedy"], *text).exhaust().new_tokens
        steps += len(blocks) - (len(blocks[-1].rows[0].tokens) == 1)  # nothing is drafted, and learnt, for a last token
        assert planner.steps == steps
        text, past = [*text, *going.new_tokens[0], *QUESTION[:2]], going.past


@pytest.mark.slow
def test_a_compiled_target_reads_what_is_new_in_a_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompiledModel(tiny_model("llama", VOCAB, seed=3), backend="eager")
    monkeypatch.setattr(import_module("polydraft.engine.generate"), "target_model", lambda *_, **__: compiled)
    options: dict[str, Any] = {"drafter": "none", "max_new_tokens": 4, "temperature": 0}
    first = polydraft.stream(compiled.model, prompt(*PROMPT), keep_past=True, **options).exhaust()
    shapes = {shape[1] for shape in compiled.passes.seconds}
    asked = prompt(*PROMPT, *first.new_tokens[0], *QUESTION)
    second = polydraft.stream(compiled.model, asked, past=first.past, **options).exhaust()
    assert shapes == {1} == {shape[1] for shape in compiled.passes.seconds}
    assert second.new_tokens == polydraft.stream(compiled.model, asked, **options).exhaust().new_tokens
    assert second.statistics.prompt_known == len(PROMPT) + 3


def test_many_prompts_are_counted() -> None:
    many = polydraft.generate_many(target(), [PROMPT, QUESTION, [2]], batch_size=2, max_new_tokens=3, drafter="none")
    assert len(list(many)) == 3
    assert (many.statistics.prompt_read, many.statistics.prompt_known) == (len(PROMPT) + len(QUESTION) + 1, 0)


def refusals() -> dict[str, tuple[Callable[[], object], str]]:
    other, changed, case = (
        tiny_model("llama", VOCAB, seed=1),
        tiny_model("llama", VOCAB, seed=2),
        CASES["plain, greedy"],
    )
    plain: dict[str, Any] = {"drafter": "none", "max_new_tokens": 2}
    _, past = first_turn(case)
    stale = polydraft.stream(changed, prompt(1, 2), keep_past=True, **plain).exhaust().past
    with torch.no_grad():
        changed.lm_head.weight.add_(1)
    two = torch.tensor([[1, 2], [3, 4]])
    return {
        "another model": (lambda: polydraft.stream(other, prompt(1), past=past, **plain), "past is of another model"),
        "other weights": (
            lambda: polydraft.stream(changed, prompt(1), past=stale, **plain),
            "past is of other weights",
        ),
        "rows": (lambda: polydraft.stream(target(), two, past=past, **plain), "past is for one text, but there are 2"),
        "kept rows": (lambda: polydraft.stream(target(), two, keep_past=True, **plain), "keep_past is for one text"),
        "sequences": (
            lambda: polydraft.generate(target(), prompt(1), past=past, num_return_sequences=2, temperature=1, **plain),
            "past is for one text, but there are 2 rows",
        ),
        "many": (lambda: polydraft.generate_many(target(), [[1]], past=past, **plain), "past=<Past> is refused"),
        "many kept": (
            lambda: polydraft.generate_many(target(), [[1]], keep_past=True, **plain),
            "keep_past=True is ref",
        ),
        "a tensor": (
            lambda: target().generate(
                **prompt(1), custom_generate=polydraft.generate, keep_past=True, drafter="none", max_new_tokens=2
            ),
            "keep_past needs return_dict_in_generate=True",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_cannot_be_gone_on_from_is_refused_by_name(name: str) -> None:
    call, said = refusals()[name]
    with pytest.raises(InvalidParameter, match=said) as refusal:
        call()
    assert str(refusal.value).count(". ") == 0


class Scale:
    """Holds a number where nobody looks."""

    by = 1.0

    def __init__(self) -> None:
        self.own = 1.0


def scaled_by_an_object(model: PreTrainedModel) -> Callable[[], object]:
    """Let a module's forward read an attribute of a plain object that the module holds; return what changes it."""
    mlp, kept = model.model.layers[0].mlp, Scale()
    plain, mlp.scale = mlp.forward, kept
    mlp.forward = lambda states: plain(states) * mlp.scale.own
    return lambda: setattr(kept, "own", -3.0)


def scaled_by_an_array(model: PreTrainedModel) -> Callable[[], object]:
    """Let a hook read a numpy array, which is changed in place."""
    array = numpy.ones(1, numpy.float32)
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, found: found * float(array[0]))
    return lambda: array.__imul__(-3)


def scaled_by_a_closure(model: PreTrainedModel) -> Callable[[], object]:
    """Let a hook close over a tensor, which is changed in place."""
    by = torch.ones(1)
    model.model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda _module, _args, found: found * by.to(found.dtype)
    )
    return lambda: by.mul_(-3)


def scaled_by_a_class(model: PreTrainedModel) -> Callable[[], object]:
    """Let a hook read a variable of a class."""

    class Own(Scale):
        pass

    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, found: found * Own.by)
    return lambda: setattr(Own, "by", -3.0)


SCALED = [scaled_by_an_object, scaled_by_an_array, scaled_by_a_closure, scaled_by_a_class]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", SCALED)
def test_a_function_that_changed_where_no_field_shows_it_is_refused(
    scaled: Callable[[PreTrainedModel], Callable[[], object]], dtype: torch.dtype
) -> None:
    one = tiny_model("llama", VOCAB, seed=4).to(dtype)
    change, options = scaled(one), {"drafter": "ngram", "max_new_tokens": 4, "temperature": 0}
    past = polydraft.stream(one, prompt(*PROMPT), keep_past=True, **options).exhaust().past
    assert past is not None
    asked, kept = prompt(*past.text.tokens[0].tolist(), *QUESTION), held(past)
    again = polydraft.generate(one, asked, past=past, **options)
    assert torch.equal(again.sequences, polydraft.generate(one, asked, **options).sequences)
    change()
    with pytest.raises(InvalidParameter, match="past is of other layers, hooks or settings than the model has now"):
        polydraft.generate(one, asked, past=past, **options)
    assert all(map(torch.equal, held(past), kept)), "a past is not written to"


def test_a_change_behind_the_last_keys_leaves_a_past_as_good_as_it_was() -> None:
    one, by = tiny_model("llama", VOCAB, seed=4), torch.ones(1)
    one.lm_head.register_forward_hook(lambda _module, _args, found: found * by)
    options: dict[str, Any] = {"drafter": "ngram", "max_new_tokens": 8, "temperature": 0}
    past = polydraft.stream(one, prompt(*PROMPT), keep_past=True, **options).exhaust().past
    assert past is not None
    asked = prompt(*past.text.tokens[0].tolist(), *QUESTION)
    before = polydraft.generate(one, asked, past=past, **options).sequences
    by.neg_()
    found = polydraft.generate(one, asked, past=past, **options)
    assert found.statistics.prompt_known == len(PROMPT) + 7
    assert torch.equal(found.sequences, polydraft.generate(one, asked, **options).sequences)
    assert not torch.equal(found.sequences, before)


def held(past: Past) -> list[Tensor]:
    """Return copies of all keys and values of a past."""
    return [store.clone() for store in past.reader.cache.stores]


@pytest.mark.wrong_types
def test_a_call_inside_model_generate_goes_on_too() -> None:
    options: dict[str, Any] = {"custom_generate": polydraft.generate, "drafter": "none", "max_new_tokens": 4}
    first = target().generate(**prompt(*PROMPT), keep_past=True, return_dict_in_generate=True, **options)
    asked = prompt(*first.sequences[0].tolist(), *QUESTION)
    second = target().generate(**asked, past=first.past, return_dict_in_generate=True, **options)
    assert second.statistics.prompt_known == len(PROMPT) + 3
    assert torch.equal(second.sequences, target().generate(**asked, **options))
