"""Many prompts in one running batch: names and seeds, options of single prompts, steps, refusals, memory."""

import re
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Completed, ModelDrafter, NoDraft, generate_many
from polydraft.drafters import EnsembleDrafter
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, check_memory, memory
from polydraft.models.checks import room
from polydraft.verifiers import ByShape

VOCAB, NEW = 30, 8
PROMPTS: dict[Hashable, Tensor] = {
    "pi": torch.tensor([3, 1, 4, 1, 5, 9, 2]),
    "one": torch.tensor([7]),
    17: torch.tensor([2, 7, 1, 8]),
    "long": torch.tensor([1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9]),
}


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def drafter() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), 0.05)))


CHECK = "polydraft.engine.many.many_run.check_memory"


def many(
    names: list[Hashable] | None = None, per_prompt: Mapping[Hashable, Mapping[str, Any]] | None = None, **options: Any
) -> dict[Hashable, Completed]:
    chosen = {name: PROMPTS[name] for name in names or list(PROMPTS)}
    given = {"drafter": drafter(), "max_new_tokens": NEW, "seed": 5, "top_k": 0, **options}
    return {one.name: one for one in generate_many(target(), chosen, per_prompt=per_prompt, **given)}


def alone(name: Hashable, seed: int, **options: Any) -> list[int]:
    prompt = PROMPTS[name].unsqueeze(0)
    given = {"drafter": drafter(), "max_new_tokens": NEW, "seed": seed, "top_k": 0, **options}
    output = polydraft.generate(target(), prompt, attention_mask=torch.ones_like(prompt), **given)
    assert isinstance(output, polydraft.GenerationOutput)
    return output.sequences[0, prompt.shape[1] :].tolist()


@pytest.mark.long(2)
@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("size", [1, 3])
def test_a_text_is_that_of_its_prompt_alone_whatever_the_batch_and_the_order(size: int, heat: float) -> None:
    done = many(batch_size=size, temperature=heat)
    back = many(names=list(PROMPTS)[::-1], batch_size=size, temperature=heat)
    for name, one in done.items():
        assert one.tokens == alone(name, one.seed, temperature=heat)
        assert (back[name].tokens, back[name].seed) == (one.tokens, one.seed)
        assert one.block_efficiency == NEW / one.target_calls
    assert len({one.seed for one in done.values()}) == len(PROMPTS)
    assert sum(one.accepted for one in done.values()) > 0


def test_other_seeds_and_other_names_give_other_texts() -> None:
    first, second = (many(seed=seed, temperature=0.8) for seed in (5, 6))
    assert all(first[name].tokens != second[name].tokens for name in PROMPTS)
    same = {"a": PROMPTS["pi"], "b": PROMPTS["pi"]}
    texts = [one.tokens for one in generate_many(target(), same, seed=5, temperature=0.8, max_new_tokens=NEW)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("size", [1, 3])
def test_a_prompt_may_have_options_of_its_own(size: int) -> None:
    own: dict[Hashable, dict[str, Any]] = {"pi": {"max_new_tokens": 3, "seed": 99}, 17: {"temperature": 1.7}}
    verifier = ByShape()
    done = many(per_prompt=own, batch_size=size, temperature=0.8, verifier=verifier)
    assert done["pi"].seed == 99
    assert done["pi"].tokens == alone("pi", 99, temperature=0.8, max_new_tokens=3)
    usual = many(temperature=0.8)
    assert done["one"].tokens == usual["one"].tokens and done[17].tokens != usual[17].tokens
    assert len(done[17].tokens) == NEW


def test_the_options_of_one_prompt_choose_no_verifier_for_the_others() -> None:
    own: dict[Hashable, dict[str, Any]] = {"pi": {"temperature": 0}}
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "max_new_tokens": NEW}
    run = generate_many(target(), PROMPTS, drafter=drafter(), per_prompt=own, **options)
    assert run.setup.method.verifier == ByShape()
    assert run.setup.law.params.temperature == 0.8


def test_a_longer_text_of_one_prompt_has_room() -> None:
    done = many(per_prompt={"one": {"max_new_tokens": 40}}, temperature=0, batch_size=2)
    assert len(done["one"].tokens) == 40 and len(done["long"].tokens) == NEW
    assert done["one"].tokens == alone("one", 0, temperature=0, max_new_tokens=40)


def test_steps_hand_over_every_text_once() -> None:
    run = generate_many(target(), PROMPTS, batch_size=2, drafter=drafter(), temperature=0, max_new_tokens=NEW)
    ended: list[Completed] = []
    steps = 0
    while not run.over:
        ended.extend(run.step())
        steps += 1
    assert sorted(str(one.name) for one in ended) == sorted(map(str, PROMPTS))
    assert steps == run.statistics.steps
    assert run.step() == [] and list(run) == []


def test_a_prompt_longer_than_max_length_is_refused_and_the_others_end_there() -> None:
    run = generate_many(target(), PROMPTS, batch_size=2, drafter=NoDraft(), temperature=0, max_length=7)
    done = {one.name: one for one in run}
    assert {name for name, one in done.items() if one.finish == "refused"} == {"pi", "long"}
    assert done["long"].error == "The prompt has 13 tokens, but at most 7 fit, one of them new."
    assert len(done["one"].tokens) == 6 and len(done[17].tokens) == 3


def test_only_prompts_that_are_refused() -> None:
    nothing = {"empty": torch.zeros(0, dtype=torch.int64)}
    run = generate_many(target(), nothing, max_new_tokens=NEW)
    assert [one.finish for one in run.step()] == ["refused"]
    assert run.over and run.statistics.new_tokens == 0


@pytest.mark.parametrize("seed", [-1, 2**62])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InvalidParameter, match="seed must be an integer >= 0 and below 2\\^62"):
        generate_many(target(), PROMPTS, seed=seed)


def test_the_largest_seed_and_number_are_no_overflow() -> None:
    prompts: dict[Hashable, Tensor] = {-1: PROMPTS["pi"], 10**30: PROMPTS["one"]}
    done = list(generate_many(target(), prompts, seed=2**62 - 1, max_new_tokens=2, temperature=1))
    assert all(0 <= one.seed < 2**63 and len(one.tokens) == 2 for one in done)


def test_options_for_no_prompt_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="per_prompt has options for 'two', but there is no such prompt"):
        generate_many(target(), PROMPTS, per_prompt={"two": {}})


class TestMemory:
    def test_what_one_batch_needs_is_all_caches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "free_bytes", lambda _: 1)
        model = HuggingFaceModel(target())
        both = EnsembleDrafter(((drafter().model, None), (drafter().model, polydraft.SamplingParams())))
        sizes = []
        for chosen in (NoDraft(), drafter(), both):
            seen: list[HuggingFaceModel] = []
            monkeypatch.setattr(CHECK, lambda models, *_, seen=seen: seen.extend(models))
            generate_many(target(), PROMPTS, drafter=chosen, max_new_tokens=NEW)
            sizes.append(len(seen))
        assert sizes == [1, 2, 2]
        with pytest.raises(InvalidParameter, match="not even one fits; ask for fewer new tokens"):
            check_memory([model], 2, 100)

    def test_the_smaller_of_machine_and_container_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = tmp_path / "meminfo"
        machine.write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 100 kB\n")
        monkeypatch.setattr(memory, "MEMORY_INFO", machine)
        monkeypatch.setattr(memory, "CONTAINER", tmp_path)
        assert memory.free_bytes(torch.device("cpu")) == 102_400
        (tmp_path / "memory.max").write_text("max\n")
        (tmp_path / "memory.current").write_text("9\n")
        assert memory.free_bytes(torch.device("cpu")) == 102_400
        (tmp_path / "memory.max").write_text("5000\n")
        (tmp_path / "memory.current").write_text("4000\n")
        (tmp_path / "memory.stat").write_text("anon 3500\nfile 500\n")
        assert memory.free_bytes(torch.device("cpu")) == 1_500
        machine.unlink()
        assert memory.free_bytes(torch.device("cpu")) == 1_500


def test_the_snippet_of_the_page_on_batches_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "batches.md"
    if not (page.parents[1] / "src" / "polydraft" / "data" / "pair" / "target" / "config.json").is_file():
        pytest.skip("the embedded pair is not in src/polydraft/data/pair")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(snippet, str(page), "exec"), names)
    assert names["run"].over and len(names["alone"].sequences[0]) == len(names["prompts"]["gcd"]) + 24
    assert names["alone"].sequences[0, -24:].tolist() == names["done"]["gcd"].tokens
