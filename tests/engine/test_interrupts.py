"""A run that is interrupted anywhere goes on, writes the text it would have written, and counts everything once."""

import copy
import dis
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from key_views import few
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import polydraft
from polydraft import (
    Chain,
    Chunks,
    Completed,
    ManyRun,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    Run,
    Snap,
    Widths,
    generate_many,
)
from polydraft.drafters import (
    Drafter,
    EnsembleDrafter,
    LookaheadDrafter,
    LookupFirst,
    OuroborosDrafter,
)
from polydraft.engine import Block, Planner, Statistics
from polydraft.engine.choices import default_verifier
from polydraft.errors import InvalidProbabilities
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.schemes import IID
from polydraft.trees import TreePolicy
from polydraft.trees.growing import AdaptiveThreshold, BestFirst
from polydraft.verifiers import RecursiveRejection, TopDown, TreeVerifier

VOCAB, NEW, END = 24, 7, 11
LOAD, RETURN, CONSTANT = (dis.opmap[name] for name in ("LOAD_FAST", "RETURN_VALUE", "LOAD_CONST"))
SOURCE = str(Path(polydraft.__file__).parent)
ROWS = torch.tensor([[5, 8, 5, 8, 5, 8, 5], [0, 0, 0, 3, 1, 4, 1]])
MASK = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [7], [5, 8, 5, 8, 5, 8], [2, 7, 1, 8], [9, 9]]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


def model(scale: float = 0.05) -> HuggingFaceModel:
    return HuggingFaceModel(_perturbed(scale))


@cache
def _perturbed(scale: float) -> PreTrainedModel:
    return perturbed(target(), scale)


@dataclass(frozen=True)
class Case:
    """A way to decode, made anew for every run."""

    drafter: Callable[[], Drafter]
    policy: Callable[[], TreePolicy]
    temperature: float
    rule: Callable[[], TreeVerifier] | None = None
    timed: bool = False  # times choose the trees

    def options(self) -> dict[str, Any]:
        drafter = self.drafter()
        rule = self.rule() if self.rule else default_verifier(drafter, SamplingParams(temperature=self.temperature))
        return {
            "drafter": drafter,
            "verifier": copy.copy(rule),  # defaults are shared, and its verbs are wrapped
            "policy": self.policy(),
            "temperature": self.temperature,
            "max_new_tokens": NEW,
            "eos_token_id": END,
            "seed": 4,
            **({"top_k": 0} if self.temperature else {}),
        }


def drafting(scale: float = 0.05) -> ModelDrafter:
    return ModelDrafter(model(scale))


def ensemble() -> EnsembleDrafter:
    return EnsembleDrafter(((model(), None), (model(0.1), SamplingParams(temperature=0.5))))


def recursive() -> TreeVerifier:
    return TopDown(RecursiveRejection(IID()))


CASES = {
    "plain, greedy": Case(NoDraft, partial(Chain, 1), 0),
    "plain, sampled": Case(NoDraft, partial(Chain, 1), 0.9),
    "n-gram, greedy": Case(NgramDrafter, partial(Chain, 4), 0),
    "n-gram, sampled": Case(NgramDrafter, partial(Chain, 4), 0.9),
    "lookahead": Case(partial(LookaheadDrafter, 3, 3, 2, True), partial(Widths, (2, 1)), 0.9),
    "ouroboros": Case(lambda: OuroborosDrafter(model(), 2, 2, 3, 3, 2), partial(Widths, (2, 1, 1, 1)), 0.9),
    "model, greedy": Case(drafting, partial(Widths, (2, 2, 1)), 0),
    "model, sampled": Case(drafting, partial(Chain, 3), 0.9),
    "model, dynamic": Case(drafting, partial(BestFirst, 6, 3, 3), 0.9, recursive),
    "model, learning": Case(drafting, partial(AdaptiveThreshold, 3, 0.3), 0.9),
    "ensemble, greedy": Case(ensemble, partial(Widths, (2, 1)), 0),
    "ensemble, sampled": Case(ensemble, partial(Widths, (2, 1)), 0.9),
    "lookup, greedy": Case(lambda: LookupFirst(drafting(), 1), partial(Widths, (2, 1, 1)), 0),
    "lookup, sampled": Case(lambda: LookupFirst(drafting(), 1), partial(Chain, 3), 0.9),
    "few keys, greedy": Case(lambda: few(Chunks(4, 2, 4)), partial(Chain, 2), 0),
    "few keys, sampled": Case(lambda: few(Snap(4, 4)), partial(Chain, 2), 0.9),
    "planner, greedy": Case(drafting, partial(Planner, (Widths((2, 1)), Chain(1))), 0, timed=True),
    "planner, sampled": Case(drafting, partial(Planner, (Chain(3), Chain(1))), 0.9, timed=True),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])


class Interrupt(KeyboardInterrupt):
    """Somebody pressed Ctrl-C."""


def returns(frame: FrameType) -> bool:
    """Tell whether the next thing to happen in a frame is the return of a local name, or of what was found."""
    code, place = frame.f_code.co_code, frame.f_lasti
    return RETURN in (code[place], code[place + 2] if code[place] == LOAD else None)


def leaves(frame: FrameType) -> bool:
    """Tell whether the next thing to happen in a frame is the exit of a `with` whose block is through."""
    code, place = frame.f_code.co_code, frame.f_lasti
    return code[place : place + 5 : 2] == bytes([CONSTANT] * 3)  # None for the kind of an error, itself and its place


class AtLine:
    """Interrupts at the line of the package that is reached as the n-th, counting all that run.

    The return of a local name and the exit of a `with` do not count: Python looks for signals at calls and jumps, not
    there, so that a lock that was taken is given back.
    """

    def __init__(self, number: int = 0) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> "AtLine | None":
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line" and not returns(frame) and not leaves(frame):
            self.count += 1
            if self.count == self.number:
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


@dataclass
class AtCall:
    """Interrupts before or after the n-th call of the functions that are wrapped."""

    number: int = 0
    error: type[BaseException] = Interrupt
    count: int = 0
    calls: list[str] = field(default_factory=list)

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            self.point(f"before {name}")
            result = function(*inputs, **options)
            self.point(f"after {name}")
            return result

        return call

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            object.__setattr__(owner, name, self.wrapped(f"{type(owner).__name__}.{name}", getattr(owner, name)))

    def point(self, name: str) -> None:
        self.calls.append(name)
        self.count += 1
        if self.count == self.number:
            raise self.error(name)

    def wrap_caches(self, language_model: Any) -> None:
        make = language_model.new_cache

        def new_cache(batch: int, capacity: int) -> Any:
            made = make(batch, capacity)
            self.wrap(made, "keep", "put")
            return made

        language_model.new_cache = new_cache

    def wrap_run(self, run: Run | ManyRun) -> None:
        setup = run.setup
        models = [setup.target, *models_of(setup.method.drafter)]
        for one in {id(one): one for one in models}.values():
            self.wrap_caches(one)
            self.wrap(one, "forward")
        self.wrap(setup.method.drafter, "start", "read", "draft", "commit")
        self.wrap(setup.method.verifier, "verify")
        if isinstance(run, ManyRun) and run._batch is not None:
            self.wrap(run._batch.batch.reader.cache, "keep", "put")  # made before


def models_of(drafter: Drafter) -> list[HuggingFaceModel]:
    inner = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    members = [inner.model] if isinstance(inner, ModelDrafter) else []
    return [*members, *([one for one, _ in inner.members] if isinstance(inner, EnsembleDrafter) else [])]


# What a run comes to.


def started(case: Case, **options: Any) -> Run:
    return polydraft.stream(target(), ROWS, attention_mask=MASK, pad_token_id=0, **case.options(), **options)


def many(case: Case, **options: Any) -> ManyRun:
    return generate_many(target(), PROMPTS, batch_size=2, **case.options(), **options)


def counts(statistics: Statistics) -> dict[str, object]:
    return {**statistics.as_dict(), "seconds": 0, "tokens_per_second": 0}


Texts = tuple[list[list[int]], list[str]]


def written(run: Run, at: AtLine | AtCall | None = None) -> tuple[Texts, list[Block], int]:
    """Return the texts, the blocks, and how often the run was interrupted."""
    blocks, interrupts = list[Block](), 0
    while not run.over:
        try:
            with at.traced() if isinstance(at, AtLine) and not interrupts else nothing():
                blocks.extend(run)
        except (Interrupt, OSError):
            interrupts += 1
            consistent(run)
    assert list(run) == [] and run.statistics.seconds["total"] > 0
    return (run.new_tokens, run.finish), blocks, interrupts


def consistent(run: Run) -> None:
    """Check what can be seen between an interrupt and the next step."""
    assert run.statistics.new_tokens == sum(map(len, run.new_tokens))


@contextmanager
def nothing() -> Iterator[None]:
    yield


def same_run(case: Case, run: Run, at: AtLine | AtCall) -> None:
    """Check that an interrupted run is the undisturbed one."""
    texts, totals = undisturbed(case)
    found, blocks, interrupts = written(run, at)
    assert interrupts == 1
    if not (case.timed and case.temperature):
        assert found == texts
    for row, tokens in enumerate(run.new_tokens):
        handed = [token for block in blocks if row in block.rows for token in block.rows[row].tokens]
        assert handed == tokens, "every block is handed over once"
        ended = (tokens[-1] == END) if run.finish[row] == "eos" else len(tokens) == NEW
        assert ended and END not in tokens[:-1]
    assert run.statistics.steps == len(blocks)
    if not case.timed:
        assert counts(run.statistics) == totals


@cache
def undisturbed(case: Case) -> tuple[Texts, dict[str, object]]:
    run = started(case)
    texts, _, _ = written(run)
    return texts, counts(run.statistics)


def collected(run: ManyRun, at: AtLine | AtCall | None = None, steps: bool = False) -> tuple[list[Completed], int]:
    """Return the completed texts as they came, and how often the run was interrupted."""
    done, interrupts = list[Completed](), 0
    while not run.over:
        try:
            with at.traced() if isinstance(at, AtLine) and not interrupts else nothing():
                if steps:
                    done += run.step()
                else:
                    done.append(next(run))
        except (Interrupt, OSError):
            interrupts += 1
    assert list(run) == [] and run.step() == []
    return done, interrupts


def same_many(case: Case, run: ManyRun, at: AtLine | AtCall, steps: bool = False) -> None:
    """Check that an interrupted run over many prompts is the undisturbed one."""
    texts, totals = undisturbed_many(case)
    done, interrupts = collected(run, at, steps)
    assert interrupts == 1
    assert sorted(str(one.name) for one in done) == [str(place) for place in range(len(PROMPTS))]
    if case.timed:
        assert case.temperature or {one.name: one.tokens for one in done} == {one.name: one.tokens for one in texts}
        assert {one.finish for one in done} <= {"eos", "length"}
        assert run.statistics.new_tokens == sum(len(one.tokens) for one in done)
        assert run.statistics.target_calls == sum(one.target_calls for one in done)
    else:
        assert done == texts
        assert counts(run.statistics) == totals


@cache
def undisturbed_many(case: Case) -> tuple[list[Completed], dict[str, object]]:
    run = many(case)
    done, _ = collected(run)
    return done, counts(run.statistics)


def lines_of(begin: Callable[[], Run | ManyRun]) -> int:
    """Return how many lines of the package an undisturbed run comes to that is not the first of its kind."""
    list(begin())
    at, run = AtLine(), begin()
    with at.traced():
        list(run)
    return at.count


def sweep(case: Case, tries: int, offset: int = 0) -> int:
    """Interrupt a run at lines spread over it, and a run over many prompts at as many; return how many that were."""
    tried = 0
    for begin, check in ((started, same_run), (many, same_many)):
        lines = lines_of(partial(begin, case))
        lines = lines * 2 // 3 if case.timed else lines - 1
        for number in sorted({1 + (lines * place + offset) // tries % lines for place in range(tries)}):
            check(case, begin(case), AtLine(number))
            tried += 1
    return tried


FEW = ("plain, sampled", "n-gram, greedy", "model, greedy", "model, dynamic", "ensemble, sampled", "lookup, sampled")
"""The cases of the ordinary suite; the slow one has them all, at more lines."""


@pytest.mark.long(2)
@pytest.mark.parametrize("name", [*FEW, "planner, greedy"])
def test_an_interrupt_at_any_line_loses_nothing(name: str) -> None:
    lines_apart = 37 * [*CASES].index(name)
    assert sweep(CASES[name], 2, lines_apart) == 4


@pytest.mark.slow
@every_case
def test_an_interrupt_at_any_of_many_lines_loses_nothing(case: Case) -> None:
    assert sweep(case, 100) == 200


def calls_of(begin: Callable[[], Run | ManyRun]) -> list[str]:
    list(begin())  # in the first of its kind the models are tried
    at, run = AtCall(), begin()
    at.wrap_run(run)
    list(run)
    return at.calls


@pytest.mark.long(1)
@pytest.mark.parametrize("name", ["model, greedy", "lookup, sampled"])
def test_an_interrupt_before_or_after_any_call_loses_nothing(name: str) -> None:
    case = CASES[name]
    for begin, check in ((started, same_run), (many, same_many)):
        calls = calls_of(partial(begin, case))
        assert {"before TreeCache.keep", "after HuggingFaceModel.forward"} <= {*calls}
        assert begin is started or "after TreeCache.put" in calls
        places = {call: 1 + place for place, call in enumerate(calls[: len(calls) * 3 // 4])}  # the last of each
        for number in places.values():
            run, at = begin(case), AtCall(number)
            at.wrap_run(run)
            check(case, run, at)


@pytest.mark.long(1)
@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_an_interrupt_loses_nothing_where_prompts_have_drafters_of_their_own(heat: float) -> None:
    case = CASES["model, sampled" if heat else "model, greedy"]
    own = {1: {"drafter": "none"}, 2: {"drafter": "ngram", "verifier": None}, 4: {"drafter": ensemble(), "policy": 2}}
    own[4]["verifier"] = own[1]["verifier"] = None

    def begin() -> ManyRun:
        return many(case, per_prompt=own)

    whole = begin()
    expected, totals = collected(whole)[0], counts(whole.statistics)
    lines = lines_of(begin)
    for number in range(lines // 9, lines, lines // 4):
        run = begin()
        done, interrupts = collected(run, AtLine(number))
        assert (done, interrupts, counts(run.statistics)) == (expected, 1, totals)


def test_steps_of_a_run_over_many_prompts_hand_every_text_over_once() -> None:
    case = CASES["plain, greedy"]
    for number in range(200, 1000, 170):
        same_many(case, many(case), AtLine(number), steps=True)


class Forbidding(LogitsProcessor):
    """Forbids a token."""

    stateless = True

    def __init__(self, at: AtCall) -> None:
        self.at = at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.at.point("processor")
        return scores.index_fill(-1, torch.tensor([3]), -torch.inf)


class Never(StoppingCriteria):
    """Ends nothing."""

    stateless = True

    def __init__(self, at: AtCall) -> None:
        self.at = at

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        self.at.point("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.long(2)
@pytest.mark.parametrize("error", [Interrupt, OSError], ids=["interrupt", "error"])
@pytest.mark.parametrize("begin", [started, many], ids=["run", "many"])
def test_an_error_in_what_the_user_gave_loses_nothing(
    begin: Callable[..., Run | ManyRun], error: type[BaseException]
) -> None:
    case = CASES["model, sampled"]

    def run_with(at: AtCall) -> Run | ManyRun:
        processors, criteria = LogitsProcessorList([Forbidding(at)]), StoppingCriteriaList([Never(at)])
        return begin(case, logits_processor=processors, stopping_criteria=criteria)

    def came(run: Run | ManyRun) -> object:
        found = written(run)[0] if isinstance(run, Run) else collected(run)[0]
        return found, counts(run.statistics)

    whole = AtCall()
    expected = came(run_with(whole))
    assert {*whole.calls} == {"processor", "criterion"}
    for number in range(1, whole.count, whole.count // 5):
        at = AtCall(number, error)
        assert came(run_with(at)) == expected
        assert at.count > whole.count


class Unusable(LogitsProcessor):
    """Leaves no number once the text is long enough."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * torch.nan if input_ids.shape[1] > 10 else scores


@pytest.mark.parametrize("begin", [started, many], ids=["run", "many"])
def test_an_error_that_lasts_is_raised_again_and_nothing_seems_complete(begin: Callable[..., Run | ManyRun]) -> None:
    run = begin(CASES["plain, greedy"], logits_processor=LogitsProcessorList([Unusable()]))
    for _ in range(3):
        with pytest.raises(InvalidProbabilities):
            list(run)
        assert not run.over
    if isinstance(run, Run):
        assert run.finish == ["", ""] and [len(tokens) for tokens in run.new_tokens] == [4, 4]


def test_whether_a_run_is_over() -> None:
    run = started(CASES["model, greedy"])
    assert not run.over and run.finish == ["", ""]
    next(run)
    assert not run.over
    run.exhaust()
    assert run.over and "" not in run.finish
    assert list(run) == []


def test_what_an_ended_run_keeps_is_no_cache() -> None:
    run = started(CASES["model, sampled"])
    held = list[Any]()
    make = run.setup.target.new_cache
    run.setup.target.new_cache = lambda *sizes: held.append(weakref.ref(made := make(*sizes))) or made  # type: ignore[method-assign]
    run.exhaust()
    gc.collect()
    assert len(held) == 1 and held[0]() is None


class Counting(LogitsProcessor):
    """Keeps state: forbids a token after every third call."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def fork(self) -> "Counting":
        return Counting(self.calls)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores if self.calls % 3 else scores.index_fill(-1, scores.argmax(dim=-1), -torch.inf)


def test_an_interrupt_leaves_a_processor_in_the_state_that_it_had() -> None:
    case = CASES["model, greedy"]

    def begin() -> Run:
        return started(case, logits_processor=LogitsProcessorList([Counting()]))

    expected, _, _ = written(begin())
    assert expected != undisturbed(case)[0]
    lines = lines_of(begin)
    for number in range(lines // 5, lines, lines // 5):
        found, _, interrupts = written(begin(), AtLine(number))
        assert interrupts == 1 and found == expected
