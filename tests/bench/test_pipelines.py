"""Simulated pipelines: events agree with the formula where hand-overs are free, and the text is plain decoding's."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft.drafters import SelfDrafter, View
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, LayerSet
from polydraft.probs import Noise
from polydraft.trees import Widths
from polydraft.verifiers import SharedNoise
from polydraft_lab.subjects.pipelines import (
    Pipeline,
    PipelineCosts,
    PipelineSettings,
    pipeline_time,
    record,
    simulate_pipelines,
)

LAYERS, PROMPT, NEW, SEED = 4, torch.tensor([[3, 1, 4, 1, 5]]), 24, 3
HALF_RIGHT = [random.Random(0).random() < 0.5 for _ in range(200)]


@cache
def target() -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model("llama", num_hidden_layers=LAYERS, initializer_range=0.3))


def per_token(hits: Sequence[bool], costs: PipelineCosts, in_flight: int | None) -> float:
    ended = Pipeline(hits, costs, in_flight=in_flight).ended
    assert len(ended) == len(hits) and ended == sorted(ended)
    return (ended[-1] - ended[0]) / (len(ended) - 1)


@pytest.mark.parametrize("exit_layer", range(1, 12))
@pytest.mark.parametrize("in_flight", [1, None])
def test_events_agree_with_the_formula_where_hand_overs_are_free(exit_layer: int, in_flight: int | None) -> None:
    costs = PipelineCosts(exit_layer, 12, 0.7)
    for hits in (HALF_RIGHT, [True] * 50, [False] * 50):
        right = sum(hits[1:]) / (len(hits) - 1)
        found, formula = per_token(hits, costs, in_flight), costs.by_formula(right)
        holds = in_flight is None or 2 * exit_layer >= 12 or not right
        assert (found == pytest.approx(formula)) if holds else found > 1.01 * formula
        told = pipeline_time("SPEED" if in_flight is None else "PPD", 0.0, 1, [hits], costs, None)
        assert told.simulated_ms == found and told.right == right
        assert (told.formula_ms == pytest.approx(formula)) if 2 * exit_layer >= 12 or in_flight is None else True
        assert (told.formula_ms is None) == (in_flight == 1 and 2 * exit_layer < 12)


def test_one_guess_in_flight_waits_for_the_token_before_it() -> None:
    """Token 2 could begin at 2, but token 1 is not confirmed before 4."""
    assert Pipeline([True] * 4, PipelineCosts(1, 4), in_flight=1).ended == [4, 5, 8, 9]
    assert Pipeline([True] * 4, PipelineCosts(1, 4)).ended == [4, 5, 6, 7]
    assert Pipeline([True, False, True, True], PipelineCosts(1, 4)).ended == [4, 8, 9, 10]


@pytest.mark.parametrize("hand_over", [0.5, 2.0, 4.0, 9.0])
def test_a_hand_over_costs_its_time_until_nothing_is_gained(hand_over: float) -> None:
    costs, right = PipelineCosts(6, 10, 1.0, hand_over), sum(HALF_RIGHT[1:]) / (len(HALF_RIGHT) - 1)
    gained = max(0.0, 10 - 6 - hand_over)
    for in_flight in (1, None):
        assert per_token(HALF_RIGHT, costs, in_flight) == pytest.approx(10 - right * gained)


def test_what_all_workers_run_is_counted() -> None:
    """Of k workers with guesses, each at N - E layers when the token before is known, one goes on if it was right."""
    costs = PipelineCosts(6, 10)
    for hits, more in (([True] * 20, 2 * 4), ([False] * 20, 3 * 4)):
        assert Pipeline(hits, costs, 3, 1).layers_run == 20 * 10 + 19 * more
    wrong = Pipeline([False] * 2, PipelineCosts(2, 10))
    assert wrong.layers_run == 2 * 10 + 8, "one guess ran for 8 layers, and a text of two tokens has no third"


def test_the_text_is_plain_decodings_and_all_layers_find_none_likelier() -> None:
    greedy = record(target(), PROMPT, (2, LAYERS), 0.0, NEW, SEED)
    model: Any = target().model
    theirs = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(PROMPT))
    assert greedy.tokens.tolist() == theirs[0, PROMPT.shape[1] :].tolist()
    sampled = record(target(), PROMPT, (2, LAYERS), 0.8, NEW, SEED)
    assert sampled.tokens.tolist() == gumbel_text(0.8) != greedy.tokens.tolist()
    for text in (greedy, sampled):
        assert not text.ranks[LAYERS].any() and text.ranks[2].any() and not text.ranks[2].all()


def gumbel_text(temperature: float) -> list[int]:
    """Write argmax(logits / T + Gumbel noise), one pass for each token."""
    text, every = PROMPT, torch.arange(target().vocab_size).unsqueeze(0)
    for _ in range(NEW):
        with torch.no_grad():
            logits = target().model(text).logits[0, -1]
        uniforms = Noise.from_seed(SEED, 1).at(0, torch.tensor([text.shape[1]])).tied(0, every)[0]
        gumbel = -(-(1 - uniforms).log()).log()
        text = torch.cat([text, (logits / temperature + gumbel).argmax().view(1, 1)], dim=-1)
    return text[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_on_this_machine_hold_the_same_guesses(temperature: float) -> None:
    """A step keeps its draft where the record says that the token was among the guesses, and the text stays."""
    found = record(target(), PROMPT, (2,), temperature, NEW, SEED)
    own: dict[str, Any] = {"verifier": SharedNoise(), "top_k": 0} if temperature else {}
    run = polydraft.stream(
        target().model, PROMPT, drafter=SelfDrafter(View(layers=LayerSet(exit=2))), policy=Widths((2,)),
        temperature=temperature, max_new_tokens=NEW, seed=SEED, **own,
    )  # fmt: skip
    place, seen = 0, set[bool]()
    for block in run:
        hit = bool(found.ranks[2][place] < 2)
        if block.rows[0].drafted:
            assert (block.rows[0].accepted == 1) == hit
            seen.add(hit)
        place += len(block.rows[0].tokens)
    assert run.new_tokens[0] == found.tokens.tolist() and seen == {True, False}


def test_both_systems_are_simulated_at_every_exit() -> None:
    settings = PipelineSettings((), (1, 2), 0.5, (0.0, 0.1), (0.0, 0.8), 6, 0)
    found = list(simulate_pipelines(target(), [PROMPT, PROMPT[:, :2]], settings))
    assert len(found) == 2 * 3 * 3 * 2 and {one.costs.exit_layer for one in found} == {1, 2, 3}
    assert all("simulated" in one.system and one.tree is None and one.tokens == 10 for one in found)
    free = [one for one in found if one.formula_ms is not None and not one.costs.hand_over_ms]
    assert free and all(one.simulated_ms == pytest.approx(one.formula_ms) for one in free)
    assert all(one.simulated_ms <= LAYERS * 0.5 and one.passes >= 1 for one in found)
    by_guesses: dict[int, list[float]] = {
        guesses: [one.right for one in found if "PPD" in one.system and one.guesses == guesses] for guesses in (1, 2)
    }
    assert all(few <= many for few, many in zip(*by_guesses.values(), strict=True))
    (timed,) = simulate_pipelines(target(), [PROMPT], PipelineSettings((3,), (), 1.0, (0.0,), (0.0,), 4))
    assert timed.tree is not None and timed.tree > 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layer_ms": 0.0}, "layer_ms must be above 0"),
    ({"layer_ms": float("nan")}, "layer_ms must be above 0"),
    ({"hand_over_ms": (1.0, -1.0)}, "hand_over_ms at least 0"),
    ({"guesses": (0,)}, "guesses start at 1"),
    ({"exits": (0,)}, "exits and guesses start at 1"),
    ({"max_new_tokens": 1}, "max_new_tokens at 2"),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD)
def test_bad_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        PipelineSettings(**wrong)


def test_an_exit_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="Exits lie behind 1 to 4 layers of this model, not behind 5"):
        record(target(), PROMPT, (5,), 0.0, 4, 0)
