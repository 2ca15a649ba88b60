"""Texts that share a prefix, of which only what is new is read; and prompts that are read in chunks."""

from dataclasses import replace
from typing import Any

import torch
from doubles import perturbed
from transformers import PreTrainedModel

from polydraft import Chain, HuggingFaceModel, ModelDrafter, NaiveMatch, SamplingParams, TopDown
from polydraft.drafters import Session
from polydraft.engine import Ending, Method, Request, RunningBatch, TargetLaw
from polydraft.engine.loop.step import LOOP
from polydraft.probs import Noise
from polydraft.reading import Text

FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 3, 5]
GREEDY = SamplingParams(temperature=0)


def written(loop: Any, prompt: list[int]) -> list[int]:
    """Return twelve tokens that a loop writes after a prompt."""
    loop = LOOP.on(loop, Text(torch.tensor([prompt]), torch.tensor([len(prompt)])), Noise.from_seed(0, 1))
    while loop.text.counts[0] < len(prompt) + 12:
        loop, _ = LOOP.step(loop)
    text = loop.text.tokens[0, len(prompt) : len(prompt) + 12].tolist()
    return [loop, text]  # type: ignore[return-value]


def test_a_loop_rewinds_to_a_shared_prefix(target: PreTrainedModel) -> None:
    model, drafter = HuggingFaceModel(target), ModelDrafter(HuggingFaceModel(perturbed(target, 0.1)))
    session, text = Session(GREEDY, 64, 24), Text(torch.tensor([FIRST]), torch.tensor([len(FIRST)]))
    fresh = LOOP.begin(model, drafter, TopDown(NaiveMatch()), Chain(3), text, session)
    loop, _ = written(fresh, FIRST)
    again = loop.cut(0, 5)
    assert again.reader.read == (5,) and again.parts[0].state.reader.read == (5,)
    other = LOOP.begin(model, drafter, TopDown(NaiveMatch()), Chain(3), text, session)
    assert written(again, SECOND)[1] == written(other, SECOND)[1]


def fixed_rows(model: HuggingFaceModel, chunk: int | None) -> RunningBatch:
    drafter = ModelDrafter(HuggingFaceModel(perturbed(model.model, 0.1)))
    return RunningBatch(model, Method(drafter, TopDown(NaiveMatch()), Chain(2)), 2, 80, fixed=GREEDY, chunk=chunk)


def test_a_long_prompt_is_read_between_other_rows_steps(target: PreTrainedModel) -> None:
    model, texts = HuggingFaceModel(target), dict[int | None, dict[str, list[int]]]()
    for chunk in (None, 4):
        batch, waits = fixed_rows(model, chunk), 0
        law, ending = TargetLaw(GREEDY), Ending(max_length=24)
        short = Request("short", torch.tensor(FIRST[:2]), law, ending, Noise.from_seed(1, 1))
        batch.join(short)
        batch.step()
        batch.join(replace(short, name="long", tokens=torch.tensor(FIRST + SECOND)))
        found: dict[str, list[int]] = {"short": [], "long": []}
        while batch.running or batch.reading:
            waits += len(batch.reading)
            step = batch.step()
            for name, gained in step.gains().items() if step else ():
                found[str(name)] += gained.tokens
            batch.sweep()
        texts[chunk] = found
        assert waits == (0 if chunk is None else 4), "14 tokens by 4 are four steps, in which the other text goes on"
    assert texts[None]["long"] == texts[4]["long"] and len(texts[4]["long"]) == 9
