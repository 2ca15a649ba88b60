"""Texts that join and leave a running batch are what they would be alone."""

from collections.abc import Hashable
from functools import cache

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import (
    Chain,
    Fixed,
    HuggingFaceModel,
    JacobiDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    SamplingParams,
    TreeShape,
)
from polydraft.drafters import Drafter, EnsembleDrafter
from polydraft.engine import Ending, Method, Request, RunningBatch, TargetLaw, generate_many
from polydraft.engine.loop.step import capacity_for
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.probs import Noise
from polydraft.verifiers import NaiveMatch, TopDown

VOCAB, NEW = 30, 14
POLICY = Fixed(TreeShape(((3,), (2, 1, 0), (1,))))
PROMPTS = tuple(
    torch.tensor(row)
    for row in (
        [3, 1, 4, 1, 5, 9, 2],
        [7],
        [2, 7, 1, 8],
        [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9],
        [5, 8, 5, 8, 5],
        [9, 9],
    )
)


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


def drafters() -> dict[str, Drafter]:
    draft = HuggingFaceModel(perturbed(target(), 0.05))
    return {
        "none": NoDraft(),
        "n-gram": NgramDrafter(),
        "jacobi": JacobiDrafter(),
        "lookahead": LookaheadDrafter(3, 4, 3, pool_from_prompt=True),
        "ouroboros": OuroborosDrafter(draft, 3, 2, 3, 4, 3),
        "model": ModelDrafter(draft),
        "ensemble": EnsembleDrafter(((draft, None), (draft, SamplingParams(temperature=0.5)))),
    }


DRAWN = ("none", "model", "ensemble")


def alone(place: int, drafter: Drafter, **options: object) -> list[int]:
    prompt = PROMPTS[place].unsqueeze(0)
    output = polydraft.generate(
        target(),
        prompt,
        attention_mask=torch.ones_like(prompt),  # else Hugging Face takes token 0 for padding
        drafter=drafter,
        max_new_tokens=NEW,
        seed=11 + 1_000_003 * place,
        **options,
    )
    return output.sequences[0, prompt.shape[1] :].tolist()


@pytest.mark.long(4)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", drafters())
def test_every_text_is_what_it_is_alone(name: str, size: int, heat: float) -> None:
    drafter = drafters()[name]
    options = {"temperature": heat, "top_k": 0, "policy": POLICY if name in DRAWN else None}
    run = generate_many(target(), PROMPTS, batch_size=size, drafter=drafter, max_new_tokens=NEW, seed=11, **options)
    done = {one.name: one for one in run}
    assert sorted(done) == list(range(len(PROMPTS)))
    for place, one in done.items():
        assert one.tokens == alone(place, drafter, **options)
        assert (one.finish, one.error) == ("length", "")
    assert run.statistics.new_tokens == NEW * len(PROMPTS)
    assert run.statistics.target_calls == sum(one.target_calls for one in done.values())
    assert run.statistics.accepted == sum(one.accepted for one in done.values())


def test_a_text_ends_by_itself_and_another_takes_its_place() -> None:
    texts = [alone(place, NoDraft(), temperature=0) for place in range(len(PROMPTS))]
    eos = texts[0][3]
    run = generate_many(
        target(),
        PROMPTS,
        batch_size=2,
        drafter=drafters()["model"],
        max_new_tokens=NEW,
        temperature=0,
        eos_token_id=eos,
    )
    done = {one.name: one for one in run}
    for place, text in enumerate(texts):
        ends = eos in text
        assert done[place].tokens == (text[: text.index(eos) + 1] if ends else text)
        assert done[place].finish == ("eos" if ends else "length")
    assert any(one.finish == "eos" for one in done.values())


def test_a_full_batch_takes_fewer_steps_than_one_after_the_other() -> None:
    steps = [_steps(size) for size in (1, 3)]
    assert steps[1] < steps[0] / 2


def _steps(size: int) -> int:
    run = generate_many(target(), PROMPTS, batch_size=size, drafter=NoDraft(), max_new_tokens=NEW, temperature=0)
    assert len(list(run)) == len(PROMPTS)
    return run.statistics.steps


def test_prompts_that_cannot_be_continued_come_first_with_the_reason() -> None:
    prompts = {
        "empty": torch.zeros(0, dtype=torch.int64),
        "good": PROMPTS[0],
        "long": torch.ones(200, dtype=torch.int64),
    }
    done = list(generate_many(target(), prompts, drafter=NoDraft(), max_new_tokens=NEW, temperature=0))
    assert [(one.name, one.finish) for one in done] == [("empty", "refused"), ("long", "refused"), ("good", "length")]
    assert "empty" in done[0].error
    assert done[1].error == "The prompt has 200 tokens, but at most 128 fit, one of them new."
    assert done[2].tokens == alone(0, NoDraft(), temperature=0)


def test_nothing_to_do() -> None:
    assert list(generate_many(target(), [])) == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_needs_a_slot(size: int) -> None:
    with pytest.raises(InvalidParameter, match="batch_size must be an integer of at least 1"):
        generate_many(target(), PROMPTS, batch_size=size)


def test_a_batch_too_large_for_the_memory_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.models.checks.room.free_bytes", lambda device: 30_000)
    with pytest.raises(
        InvalidParameter, match=r"A batch of 6 texts of up to \d+ tokens needs .* GiB .*: [1-5] would fit"
    ):
        generate_many(target(), PROMPTS, batch_size=6, drafter=NoDraft(), max_new_tokens=NEW)


def fixed_rows(size: int) -> RunningBatch:
    method = Method(NoDraft(), TopDown(NaiveMatch()), Chain(1))
    capacity = capacity_for(method, [Ending(20)])
    return RunningBatch(HuggingFaceModel(target()), method, size, capacity, fixed=SamplingParams())


def request(name: str, tokens: Tensor, params: SamplingParams, limit: int = 20) -> Request:
    return Request(name, tokens, TargetLaw(params), Ending(limit), Noise.from_seed(3, 1))


def names(batch: RunningBatch) -> list[Hashable]:
    """Return whose the rows are."""
    return [None if one is None else one.name for one in batch.texts]


class TestFixedRows:
    def test_rows_may_have_settings_of_their_own(self) -> None:
        batch = fixed_rows(2)
        cold, warm = SamplingParams(temperature=0), SamplingParams(temperature=1.5)
        assert batch.join(request("cold", PROMPTS[2], cold)) == 0  # nothing of it was known
        assert names(batch) == ["cold", None]
        steps = [batch.step() for _ in range(3)]
        batch.join(request("warm", PROMPTS[2], warm))
        assert names(batch) == ["cold", "warm"] and len(batch.batch.parts) == 2
        steps += [batch.step() for _ in range(20)]
        gains = [one.gains() for one in steps if one is not None]
        texts = [[token for one in gains if own in one for token in one[own].tokens] for own in ("cold", "warm")]
        assert len(texts[0]) == len(texts[1]) == 16
        assert texts[0] == alone_until_20(0.0)
        assert texts[1] == alone_until_20(1.5)
        assert texts[0] != texts[1]
        assert names(batch) == [None, None] and batch.free == 2

    def test_a_text_may_leave_before_its_end(self) -> None:
        batch = fixed_rows(2)
        batch.join(request("a", PROMPTS[0], SamplingParams(temperature=0)))
        batch.join(request("b", PROMPTS[2], SamplingParams(temperature=0)))
        batch.leave("a")
        assert names(batch) == [None, "b"] and batch.free == 1
        found = batch.step()
        assert found is not None and [*found.block.rows] == [1] and len(found.block.tree.tokens) == 2

    def test_a_text_that_could_outgrow_them_is_refused(self) -> None:
        with pytest.raises(ContextOverflow, match="needs 33 key slots, but this batch has 23"):
            fixed_rows(1).join(request("long", PROMPTS[0], SamplingParams(), limit=30))

    def test_no_row_is_free(self) -> None:
        batch = fixed_rows(1)
        batch.join(request("a", PROMPTS[0], SamplingParams()))
        with pytest.raises(IndexError):
            batch.join(request("b", PROMPTS[0], SamplingParams()))


def alone_until_20(heat: float) -> list[int]:
    prompt = PROMPTS[2].unsqueeze(0)
    output = polydraft.generate(
        target(), prompt, drafter=NoDraft(), seed=3, temperature=heat, top_k=0, max_new_tokens=16
    )
    return output.sequences[0, prompt.shape[1] :].tolist()
