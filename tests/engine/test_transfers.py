"""How often a step waits for a device, counted on host tensors that say they are on one (`on_device`)."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from on_device import DEVICE, OnDevice, Waits, counted, moved, on_device

from polydraft.drafters import Drafter, ModelDrafter, NoDraft
from polydraft.engine import Block, Ending, Method, Prompts, TargetLaw
from polydraft.engine.choices import default_policy, default_verifier
from polydraft.engine.emission import Stopwatch
from polydraft.engine.loop.step import begin, step
from polydraft.errors import InvalidProbabilities
from polydraft.models import HuggingFaceModel, LanguageModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import TopK
from polydraft.trees import AdaptiveThreshold, BestFirst, Chain, Confident, Eagle2, GrowingPolicy, TreePolicy
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TopDown,
    TreeVerifier,
)

MOST = 3
"""The transfers that a step may wait for beside its draft: the target's rows, whether these are laws, and the roots of
rows with room for one token."""
OF_A_DRAFT, OF_A_LEVEL = 1, 2
"""Those of a draft: the root; and of each level, lists and rows. Trees grow on the host (`trees.grow`)."""
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def no_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device whose memory could be asked for, or whose launches could be recorded."""
    monkeypatch.setattr("polydraft.models.memory.free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("polydraft.models.fused.fused_pass.Graphs", lambda _: None)


def blocks(
    target: LanguageModel,
    drafter: Drafter,
    temperature: float,
    texts: Any,
    rows: int,
    policy: TreePolicy | None = None,
    verifier: TreeVerifier | None = None,
) -> Iterator[Block]:
    params, ending = SamplingParams(temperature), Ending(24)
    verifier, policy = verifier or default_verifier(drafter, params), policy or default_policy(drafter, params)
    method = Method(drafter, verifier, policy)
    asked = Prompts(texts, (TargetLaw(params),) * rows, (ending,) * rows, Noise.from_seed(0, rows))
    batch = begin(target, method, asked)
    while batch.going:
        batch, block, _ = step(batch)
        yield block


def text(rows: int, there: bool) -> Text:
    tokens, lengths = torch.tensor(PROMPTS[:rows]), torch.full((rows,), 4)
    return Text(on_device(tokens), on_device(lengths)) if there else Text(tokens, lengths)


def gained(block: Block) -> dict[int, Sequence[int]]:
    return {row: one.tokens for row, one in block.rows.items()}


@pytest.mark.long(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_step_waits_for_its_rows_and_its_drafts(drafts: bool, rows: int, temperature: float) -> None:
    target = tiny_model(seed=1)
    draft = perturbed(target, 0.3)

    def drafter() -> Drafter:
        return ModelDrafter(HuggingFaceModel(draft)) if drafts else NoDraft()

    expected = [
        gained(one) for one in blocks(HuggingFaceModel(target), drafter(), temperature, text(rows, False), rows)
    ]
    depth = default_policy(drafter(), SamplingParams(temperature)).shape.depth
    most = MOST + drafts * (OF_A_DRAFT + OF_A_LEVEL * depth)
    ready = drafter()  # a draft model is tried on the host when it is first met
    model = HuggingFaceModel(moved(target))
    moved(draft)
    found: list[dict[int, Sequence[int]]] = []
    with counted() as waits:
        for block in blocks(model, ready, temperature, text(rows, True), rows):
            assert not block.faults
            found.append(gained(block))
            if len(found) > 1:  # the first step makes tables that are kept
                assert sum(waits.reads.values()) <= most, waits.reads
                assert not waits.uploads, waits.uploads
            waits.reads.clear()
            waits.uploads.clear()
    assert found == expected and len(found) > 3


TREES = [
    (BestFirst(6, depth=4), TopDown(RecursiveRejection())),
    (BestFirst(6, depth=4), TopDown(NaiveMatch(TopK()))),
    (Eagle2(3, 3, 6), TopDown(NaiveMatch(TopK()))),
    (Eagle2(5, 4, 20), TopDown(NaiveMatch(TopK()))),
    (Confident((2, 1, 1), 0.0), BottomUp(RecursiveRejectionWithoutReplacement())),
    (Confident((2, 2, 1), 0.02), TopDown(Optimal())),
    (Confident((1, 1, 1), 0.02), BlockVerification()),
    (AdaptiveThreshold(4, 0.02), BlockVerification()),
]


@pytest.mark.long(2)
@pytest.mark.parametrize(("policy", "verifier"), TREES)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_dynamic_tree_grows_on_the_host_and_waits_for_the_rows_of_each_depth(
    policy: GrowingPolicy, verifier: TreeVerifier, rows: int
) -> None:
    target = tiny_model(seed=1)
    draft = perturbed(target, 0.3)
    temperature = 0.0 if verifier.scheme.deterministic else 1.0
    ask = {"temperature": temperature, "rows": rows, "policy": policy, "verifier": verifier}
    drafter, ready = (ModelDrafter(HuggingFaceModel(draft)) for _ in range(2))
    expected = [gained(one) for one in blocks(HuggingFaceModel(target), drafter, texts=text(rows, False), **ask)]
    model, found = HuggingFaceModel(moved(target)), list[dict[int, Sequence[int]]]()
    moved(draft)
    with counted(strict=False) as waits:
        for block in blocks(model, ready, texts=text(rows, True), **ask):
            assert not block.faults
            found.append(gained(block))
            grown = {place: count for place, count in waits.reads.items() if place.startswith("trees/")}
            most = OF_A_DRAFT + OF_A_LEVEL * policy.shape.depth + 2  # tokens of the tree, for who learns from it
            assert sum(grown.values()) <= most, grown
            assert not [place for place in waits.uploads if place.startswith("trees/")]
            waits.uploads.clear()
            waits.reads.clear()
    assert found == expected and len(found) > 3


class Editing(ModelDrafter):
    """Writes another second token into its draft, and into the list of one that it is taken from."""

    sound = False

    def draft(self, state: Any, request: Any) -> Any:
        draft, after = super().draft(state, request)
        if draft.tree.tokens.shape[1] > 2:
            other = (draft.tree.tokens[:, 2] + 1) % 24
            draft.tree.tokens[:, 2] = draft.shortlist[:, 1, 0] = other
        return draft, after


def test_what_a_drafter_changes_on_a_device_is_what_is_verified() -> None:
    target = tiny_model(seed=1)
    draft, ask = perturbed(target, 0.05), {"policy": Chain(3), "verifier": TopDown(NaiveMatch(TopK()))}
    plain = [gained(one) for one in blocks(HuggingFaceModel(target), NoDraft(), 0.0, text(1, False), 1)]
    model, drafter = HuggingFaceModel(moved(target)), Editing(HuggingFaceModel(draft))
    moved(draft)
    with counted(strict=False):
        steps = [*blocks(model, drafter, 0.0, text(1, True), 1, **ask)]
    found = [gained(one) for one in steps]
    assert not [fault for one in steps for fault in one.faults]
    assert [token for one in found for token in one[0]] == [token for one in plain for token in one[0]]


class Odd(HuggingFaceModel):
    """Has no law after some token."""

    def forward(self, tokens: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        found = super().forward(tokens, *inputs, **named)
        last = tokens[:, -found.logits.shape[1] :]
        return type(found)(found.logits.masked_fill((last == 9).unsqueeze(-1), torch.nan), found.hidden)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_below_a_row_that_is_no_law_do_not_count_on_a_device(temperature: float) -> None:
    target = tiny_model(seed=1)
    draft = perturbed(target, 0.3)
    plain = [gained(one) for one in blocks(HuggingFaceModel(target), NoDraft(), 0.0, text(1, False), 1)]
    model, drafter = HuggingFaceModel(moved(target)), ModelDrafter(Odd(draft))
    moved(draft)
    with counted():
        steps = [*blocks(model, drafter, temperature, text(1, True), 1)]
    found, (fault,) = [gained(one) for one in steps], [fault for one in steps for fault in one.faults]
    assert "logits are not usable" in fault.reason and fault.every and fault.method.drafter is drafter
    if not temperature:
        assert [token for one in found for token in one[0]] == [token for one in plain for token in one[0]]


def test_a_target_without_a_law_is_an_error_on_a_device_too() -> None:
    model = Odd(moved(tiny_model(seed=1)))
    with counted(), pytest.raises(InvalidProbabilities, match="logits are not usable"):
        list(blocks(model, NoDraft(), 0.0, text(1, True), 1))


def test_the_count_notices_what_waits_and_what_a_device_refuses() -> None:
    with counted() as waits:
        there = on_device(torch.arange(4.0))
        assert there.device == DEVICE and isinstance(there + 1, OnDevice)
        for wait in (
            lambda: there.tolist(),
            lambda: bool(there.all()),
            lambda: float(there[0]),
            lambda: there.cpu(),
            lambda: there.to("cpu"),
            lambda: there[there > 1],
            lambda: torch.nonzero(there),
        ):
            waits.reads.clear()
            wait()
            assert sum(waits.reads.values()) == 1
        for wait in (lambda: torch.tensor([1], device=there.device), lambda: there[torch.tensor([0])]):
            waits.uploads.clear()
            wait()
            assert sum(waits.uploads.values()) == 1
        waits.uploads.clear()
        torch.tensor([1.0]).to(there.device, non_blocking=True)
        assert not waits.uploads
        with pytest.raises(AssertionError, match="mixes the host and the device"):
            there + torch.arange(4.0)
    assert isinstance(waits, Waits)


class Mark:
    """An event of a device whose work takes as long as it says."""

    now, waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Mark.now

    def synchronize(self) -> None:
        Mark.waits += 1

    def elapsed_time(self, other: "Mark") -> float:
        return 1000 * (other.at - self.at)


def test_parts_are_timed_by_events_on_a_gpu_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    for timed in (True, False):
        watch, Mark.waits = Stopwatch(DEVICE, timed=timed), 0
        with watch.charge("total"):
            for name, took in (("draft", 2.0), ("target", 3.0), ("draft", 1.0)):
                with watch.charge(name):
                    Mark.now += took
        assert Mark.waits == 0, "nothing is waited for while it runs"
        parts = {name: seconds for name, seconds in watch.seconds.items() if name != "total"}
        assert parts == ({"draft": 3.0, "target": 3.0} if timed else {})
        assert 0 < watch.seconds["total"] < 1
        assert watch.lap()["draft"] == (3.0 if timed else 0.0) and watch.lap()["draft"] == 0
