"""Views over few keys beside others: in some rows of a batch, in running batches, in merges, routes and loops."""

from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from key_views import EVERY, FIRST, few
from transformers import PreTrainedModel

import polydraft
from polydraft import (
    BlockVerification,
    Chain,
    HuggingFaceModel,
    NestedDrafter,
    Snap,
    TopDown,
    TopK,
)
from polydraft.drafters import Drafter, Keys, merge_beside, route_first
from polydraft.engine import Ending, Method, TargetLaw
from polydraft.engine.many.running import Request, RunningBatch
from polydraft.probs import Noise, SamplingParams
from polydraft.verifiers import NaiveMatch

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [7, 2, 1], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [4]]
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}
every_keys = pytest.mark.parametrize("keys", EVERY, ids=str)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=3)


def plain(target: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    found = {one.name: one.tokens for one in polydraft.generate_many(target, prompts, drafter="none", **GREEDY)}
    return [found[place] for place in range(len(prompts))]


@every_keys
def test_it_drafts_for_some_rows_of_a_batch(target: PreTrainedModel, keys: Keys) -> None:
    expected, drafter = plain(target, PROMPTS), few(keys)
    own = {place: {"drafter": drafter, "policy": 3} for place in (0, 2, 3)}
    run = polydraft.generate_many(target, PROMPTS, batch_size=3, per_prompt=own, drafter="none", **GREEDY)
    texts = {one.name: one for one in run}
    assert [texts[place].tokens for place in range(4)] == expected and not run.statistics.fallback
    assert all(texts[place].accepted for place in own) and not texts[1].accepted


@pytest.mark.parametrize("keys", FIRST, ids=str)
@pytest.mark.parametrize("fixed", [True, False], ids=["idle rows", "rows that come"])
def test_rows_of_a_running_batch_are_read_in_chunks_and_kept(target: PreTrainedModel, keys: Keys, fixed: bool) -> None:
    """A text takes the row of another; one begins like a text that is kept."""
    params, model = SamplingParams(temperature=0.0), HuggingFaceModel(target)
    method = Method(few(keys), TopDown(NaiveMatch(TopK())), Chain(3))
    run = RunningBatch(model, method, 2, 80, fixed=params if fixed else None, chunk=4, keeps=3)
    prompts = [*PROMPTS, [*PROMPTS[0], 8, 8, 1]]
    found: dict[Any, list[int]] = {place: [] for place in range(len(prompts))}
    waiting = [*enumerate(prompts)]
    while waiting or run.running or run.reading:
        while waiting and run.free:
            name, tokens = waiting.pop(0)
            ending = Ending(max_length=len(tokens) + 30)
            run.join(Request(name, torch.tensor(tokens), TargetLaw(params), ending, Noise.from_seed(name, 1)))
        told = run.step()
        for name, gained in (told.gains() if told else {}).items():
            found[name] += gained.tokens
            assert not told.block.faults  # type: ignore[union-attr]
        run.sweep()
    assert list(found.values()) == plain(target, prompts)


def beside_others(target: PreTrainedModel, keys: Keys) -> dict[str, Drafter]:
    """Return drafters that have a view inside."""
    middle = HuggingFaceModel(perturbed(target, 0.02))
    return {
        "merge": merge_beside(few(keys)),
        "route": route_first(few(keys)),
        "loop": NestedDrafter(middle, few(keys), BlockVerification(), Chain(2), 3),
    }


@pytest.mark.parametrize("keys", FIRST, ids=str)
@pytest.mark.parametrize("name", ["merge", "route", "loop"])
def test_other_drafters_have_it_inside(target: PreTrainedModel, keys: Keys, name: str) -> None:
    """In a loop its texts are taken back again and again."""
    drafter = beside_others(target, keys)[name]
    options = {"policy": 3} if name != "merge" else {}
    run = polydraft.generate_many(target, PROMPTS, batch_size=2, drafter=drafter, **options, **GREEDY)
    texts = {one.name: one for one in run}
    assert [texts[place].tokens for place in range(4)] == plain(target, PROMPTS) and not run.statistics.fallback
    assert all(texts[place].accepted for place in range(4))


def test_lines_are_written_with_the_default_rule(target: PreTrainedModel) -> None:
    """Sampled, by the rule and the trees that suit it; twice the same by the same seed."""
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "seed": 3, "max_new_tokens": 20, "eos_token_id": None}
    ids = torch.tensor([PROMPTS[0]])
    texts = [polydraft.generate(target, ids, drafter=few(Snap(8, 6)), **options).sequences for _ in range(2)]
    assert torch.equal(*texts)
