"""Default trees where passes were timed and drafts watched: others only where they are faster, the same from a file."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft.drafters import ByDepthDrafter, Drafter, ModelDrafter, NgramDrafter, SelfDrafter, View
from polydraft.engine import measured
from polydraft.engine.fitted import fitted_policy
from polydraft.engine.measured import Measured
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Fixed, TreePolicy, Widths
from polydraft.verifiers import BlockVerification, NaiveMatch, TopDown

FLAT = Measured(tuple((count, 0.01) for count in (1, 2, 4, 8, 16)), 0.001, 0.001)
JUMPS = Measured(((1, 0.01), (4, 0.012), (5, 0.03), (16, 0.05)), 0.001, 0.001)
DEAR = Measured(((1, 0.01), (2, 0.03), (16, 0.2)), 0.02, 0.03)
GREEDY, SAMPLED = TopDown(NaiveMatch(TopK())), BlockVerification(IID())
COLD, WARM = SamplingParams(0.0), SamplingParams(1.0)
RARELY = ((0.2,), (0.2, 0.05), (0.2, 0.05, 0.0))
USUAL = [BestFirst(8), Chain(5), Fixed(Widths((3, 2, 1)).shape)]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HuggingFaceModel:
    """A target whose passes are timed, with a cache folder of its own."""
    monkeypatch.setenv("POLYDRAFT_MEASURE", "yes")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    forget(monkeypatch)
    return HuggingFaceModel(tiny_model(seed=1))


def told(monkeypatch: pytest.MonkeyPatch, costs: Measured | None) -> list[object]:
    """Let these be the costs that are measured; return what was asked for."""
    asked: list[object] = []
    monkeypatch.setattr(measured, "_measured", lambda *given: asked.append(given) or costs)
    return asked


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a new process."""
    monkeypatch.setattr(measured, "_KNOWN", type(measured._KNOWN)())
    monkeypatch.setattr(measured, "_BY_KEY", {})


def drafter() -> Drafter:
    return ModelDrafter(HuggingFaceModel(tiny_model(seed=2)))


@pytest.mark.parametrize("usual", USUAL, ids=str)
@pytest.mark.parametrize("costs", [FLAT, None])
def test_the_usual_tree_stays_where_passes_are_flat_or_not_timed(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, usual: TreePolicy, costs: Measured | None
) -> None:
    told(monkeypatch, costs)
    assert fitted_policy(door, drafter(), GREEDY, usual, COLD) == usual


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_trees_end_where_passes_jump(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, usual: TreePolicy
) -> None:
    told(monkeypatch, JUMPS)
    fitted = fitted_policy(door, drafter(), GREEDY, usual, COLD)
    assert fitted is not None and fitted.most_drafts == 3


def test_nothing_is_drafted_where_no_draft_can_pay_and_a_sentence_says_why(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, DEAR)
    draft, prompt = tiny_model(seed=2), torch.tensor([[1, 2, 3]])
    with pytest.warns(UserWarning, match=r"Nothing is drafted: a pass over 2 tokens takes 30\.0 ms, one over a single"):
        output = polydraft.generate(door.model, prompt, drafter=draft, max_new_tokens=6)
    assert output.statistics.drafted == 0 and output.statistics.target_calls == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a tree that is asked for is drafted
        output = polydraft.generate(door.model, prompt, drafter=draft, policy=2, max_new_tokens=6)
    assert output.statistics.drafted > 0


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_drafts_that_are_seldom_accepted_make_trees_small_or_none(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usual: TreePolicy
) -> None:
    rates = (RARELY[: min(3, usual.largest.max_children)],)
    cheap = Measured(((1, 0.01), (2, 0.0101), (16, 0.025)), 0.0, 0.0002, rates=rates, tokens=1.3)
    told(monkeypatch, cheap)
    fitted = fitted_policy(door, drafter(), GREEDY, usual, COLD)
    assert fitted is not None and fitted.most_drafts < usual.most_drafts
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "another"))
    forget(monkeypatch)
    told(monkeypatch, replace(FLAT, start=0.01, rates=rates, tokens=1.2))
    with pytest.warns(UserWarning, match=r"Drafts are accepted 20% of the time; they would pay from (5|6)\d%\."):
        assert fitted_policy(door, drafter(), GREEDY, usual, COLD) is None


@pytest.mark.parametrize("params", [COLD, WARM], ids=["greedy", "sampled"])
def test_what_is_accepted_is_seen_in_texts_of_the_target(door: HuggingFaceModel, params: SamplingParams) -> None:
    verifier, usual = (SAMPLED, Chain(3)) if params.temperature else (GREEDY, BestFirst(4))
    state = torch.get_rng_state()
    for seed, low, high in ((1, 0.75, 1.0), (2, 0.0, 0.6)):  # the target itself, and another model
        drafting = ModelDrafter(HuggingFaceModel(tiny_model(seed=seed)))
        found = measured.measured(door, drafting, verifier, usual, params.temperature)
        assert found is not None and found.acceptance is not None
        rate = sum(found.acceptance.at(0, 1))
        assert low <= rate <= high and 1 <= found.tokens <= 1 + usual.shape.depth
    assert torch.get_rng_state().equal(state)


def test_costs_are_measured_once_and_read_by_the_next_process(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, drafting = told(monkeypatch, JUMPS), drafter()
    for _ in range(2):
        assert fitted_policy(door, drafting, SAMPLED, Chain(5), WARM) == Chain(3)
    assert len(asked) == 1
    forget(monkeypatch)
    assert fitted_policy(door, drafting, SAMPLED, Chain(5), WARM) == Chain(3) and len(asked) == 1
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(file.read_text().replace("0.0", "-1"))
    forget(monkeypatch)
    assert fitted_policy(door, drafting, SAMPLED, Chain(5), WARM) == Chain(3) and len(asked) == 2
    assert json.loads(file.read_text())["level"] == JUMPS.level


@pytest.mark.filterwarnings("ignore:Nothing is drafted")
def test_passes_and_drafts_are_timed(door: HuggingFaceModel, tmp_path: Path) -> None:
    fitted_policy(door, drafter(), GREEDY, BestFirst(4), COLD)
    (file,) = (tmp_path / "costs").iterdir()
    row = json.loads(file.read_text())
    assert [count for count, _ in row["passes"]] == [1, 2, 4, 5]
    assert all(seconds > 0 for _, seconds in row["passes"]) and row["level"] >= 0


SOUND = {
    "passes": [[1, 1], [2, 1]],
    "start": 0,
    "level": 0,
    "verifying": 0,
    "rates": [],
    "tokens": 1,
    "usual": 1,
    "plain": 1,
}
DAMAGE: list[dict[str, object]] = [
    {"passes": [[1, float("inf")], [2, 1]]},
    {"passes": [[1, 0], [2, 0]]},
    {"passes": [[5, 1], [6, 2]]},
    {"passes": [[1, 1], [2, 1e308]]},
    {"passes": [[int("9" * 4000), 1], [2, 1]]},
    {"passes": []},
    {"verifying": None},
    {"rates": [[[2]]]},
    {"rates": [1]},
    {"tokens": -1},
    {"usual": -1},
]


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", *(json.dumps(SOUND | change) for change in DAMAGE)])
def test_damaged_costs_are_measured_again(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    asked, drafting = told(monkeypatch, JUMPS), drafter()
    fitted_policy(door, drafting, SAMPLED, Chain(5), WARM)
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(content)
    forget(monkeypatch)
    assert fitted_policy(door, drafting, SAMPLED, Chain(5), WARM) == Chain(3) and len(asked) == 2


def test_models_whose_weights_are_elsewhere_are_not_timed(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, drafting = told(monkeypatch, DEAR), ModelDrafter(HuggingFaceModel(tiny_model(seed=2)))
    door.model.lm_head.weight = torch.nn.Parameter(torch.empty(24, 16, device="meta"))
    assert fitted_policy(door, drafting, GREEDY, Chain(5), COLD) == Chain(5) and not asked


def test_text_drafters_and_trees_that_were_named_are_not_timed(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = told(monkeypatch, DEAR)
    prompt = torch.tensor([[1, 2, 3]])
    for choice in ({"drafter": NgramDrafter()}, {"drafter": drafter(), "policy": Chain(2)}, {"drafter": "none"}, {}):
        polydraft.generate(door.model, prompt, max_new_tokens=4, **choice)
    assert not asked


def test_a_prediction_is_drafted_whatever_a_draft_model_would_cost(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, DEAR)
    prompt, draft = torch.tensor([[1, 2, 3]]), tiny_model(seed=2)
    plain: Any = polydraft.generate(door.model, prompt, drafter="none", max_new_tokens=12, temperature=0.0)
    new = plain.sequences[0, 3:].tolist()
    given: dict[str, Any] = {"drafter": draft, "prediction": new, "max_new_tokens": 12, "temperature": 0.0}
    found: Any = polydraft.generate(door.model, prompt, **given)
    assert found.sequences.equal(plain.sequences) and found.statistics.target_calls < 8


class Broken(ModelDrafter):
    def draft(self, state: Any, request: Any) -> Any:
        raise KeyError("oops")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_what_fails_while_it_is_measured_fails_as_it_does_in_a_text(door: HuggingFaceModel) -> None:
    broken = Broken(HuggingFaceModel(tiny_model(seed=2)))
    found: Any = polydraft.generate(door.model, torch.tensor([[1, 2, 3]]), drafter=broken, max_new_tokens=6)
    assert "oops" in found.statistics.fallback and found.sequences.shape[1] == 9


def test_settings_of_drafters_are_told_apart_and_models_loaded_anew_are_not(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, usual = told(monkeypatch, JUMPS), Chain(5)
    for params in (None, SamplingParams(0.05), None):
        drafting = ModelDrafter(HuggingFaceModel(tiny_model(seed=2)), params=params)
        fitted_policy(door, drafting, SAMPLED, usual, WARM)
    assert len(asked) == 2


def test_drafters_one_behind_the_other_are_told_apart_by_what_each_drafts(
    door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names and networks are the same."""
    asked, draft = told(monkeypatch, JUMPS), HuggingFaceModel(tiny_model(seed=2))
    for lengths, longest in (((1, 4), 2), ((4, 1), 2), ((1, 4), 3), ((1, 4), 2)):
        drafting = ByDepthDrafter((ModelDrafter(draft), NgramDrafter(longest=longest)), lengths)
        fitted_policy(door, drafting, SAMPLED, Chain(5), WARM)
    assert len(asked) == 3


def test_a_call_from_inside_a_pass_that_is_measured_does_not_wait(door: HuggingFaceModel) -> None:
    inner, prompt, depth = tiny_model(seed=2), torch.tensor([[1, 2, 3]]), [0]

    def nested(*_: Any) -> None:
        if depth[0] == 0:
            depth[0] = 1
            polydraft.generate(door.model, prompt, drafter=inner, max_new_tokens=2)

    door.model.register_forward_hook(nested)
    polydraft.generate(door.model, prompt, drafter=inner, max_new_tokens=4)
    assert depth[0] == 1


@pytest.mark.parametrize(("word", "rises"), [("self:int8", True), ("self:int8,keys=recent:4+28", False)])
def test_levels_of_views_are_timed_by_how_much_is_known_once(
    word: str, rises: bool, door: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock counts the keys that passes see: all of them in the target's, few in those over few keys."""
    seen, timings = list[int](), list[object]()
    forward = HuggingFaceModel.forward

    def noted(self: HuggingFaceModel, tokens: Any, places: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        seen.append(mask.shape[-1])
        return forward(self, tokens, places, mask, *rest, **named)

    def counted(tasks: Any, *_: object) -> dict[int, list[float]]:
        timings.append(tasks)
        return {name: [task() and float(seen[-1])] for name, task in tasks.items()}

    monkeypatch.setattr(HuggingFaceModel, "forward", noted)
    monkeypatch.setattr(measured, "timed", counted)
    monkeypatch.setattr(measured, "LENGTHS", (64, 96, 120))
    view = SelfDrafter(View.named(word))
    found = measured.relative_levels(door, view)
    assert found is not None and found.passes(120) == 120 and found.levels(120) == (120 if rises else found.levels(64))
    assert (found(96) == found(120)) == rises and measured.relative_levels(door, view) is found
    monkeypatch.setattr(measured, "_LEVELS", type(measured._LEVELS)())
    assert measured.relative_levels(door, view) == found and len(timings) == 1
    assert measured.relative_levels(door, NgramDrafter()) is None
