"""Replay: every arm writes the known text, drafters are not told it, and what cannot be replayed is refused."""

from dataclasses import replace

import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer

from polydraft.bench import Prompt
from polydraft.bench.speed import (
    Arm,
    Replay,
    SpeedSettings,
    assisted_arm,
    check_known,
    drafting_arm,
    hugging_face_arm,
    lookup_arm,
    measure_speed,
    plain_arm,
    prompts_that_fit,
)
from polydraft.drafters import NgramDrafter, RecyclingDrafter, SuffixDrafter
from polydraft.drafters.several.merge import merge
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import Pair

FILE = "def add(a, b):\n    return a + b\n"
EDITED = "def add(a: int, b):\n    return a + b\n"
PROMPTS = [
    Prompt("a", "edits", f"{FILE}\n# Hint.\n", file=FILE, edited=EDITED),
    Prompt("b", "edits", f"{FILE}\n# Rename.\n", file=FILE, edited=FILE.replace("b", "c")),
]
SETTINGS = SpeedSettings(temperatures=(0.0, 1.0), max_new_tokens=500, warm_up_tokens=2, replay=True)


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny_model("llama", 101)
    tokenizer = tiny_tokenizer()
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    return Pair(target, perturbed(target, 0.1), tokenizer)


@pytest.fixture(scope="module")
def arms(pair: Pair) -> list[Arm]:
    target, draft = pair.target, pair.draft
    return [
        plain_arm(target),
        drafting_arm("default", target, draft),
        drafting_arm("prediction", target, draft, predicts=True),
        drafting_arm("ngram", target, NgramDrafter()),
        drafting_arm("suffix", target, SuffixDrafter()),
        drafting_arm("recycling", target, RecyclingDrafter()),
        drafting_arm("merge", target, merge()),
        hugging_face_arm(target),
        assisted_arm(target, draft),
        lookup_arm(target),
    ]


def written(pair: Pair, prompt: Prompt) -> tuple[int, ...]:
    ids = pair.tokenizer(prompt.edited, add_special_tokens=False)["input_ids"]
    return (*ids, pair.target.generation_config.eos_token_id)


@pytest.mark.long(1)
@pytest.mark.parametrize("size", [1, 2])
def test_every_arm_writes_the_known_text_and_its_end(pair: Pair, arms: list[Arm], size: int) -> None:
    settings = replace(SETTINGS, batch_sizes=(size,))
    part = [arm for arm in arms if arm.most_rows is None or arm.most_rows >= size]
    found = [run for runs in measure_speed(pair, part, PROMPTS, settings) for run in runs]
    assert len(found) == len(part) * 2 * 2 // size
    known = {prompt.name: written(pair, prompt) for prompt in PROMPTS}
    for run in found:
        assert run.tokens == tuple(known[name] for name in run.prompts), run.arm
        assert run.same_text is (True if run.temperature == 0 else None)


def test_lookups_find_the_edit_and_draft_models_are_not_told_it(pair: Pair, arms: list[Arm]) -> None:
    settings = replace(SETTINGS, temperatures=(0.0,))
    (runs,) = measure_speed(pair, arms, PROMPTS[:1], settings)
    counts = {run.arm: run.statistics for run in runs}
    for name in ("ngram", "suffix", "merge", "prediction", "hf-lookup"):
        assert counts[name].block_efficiency > 1.5, name
    for name in ("hf-assisted", "hf-lookup"):
        assert counts[name].accepted < counts[name].drafted, name
    assert counts["prediction"].sources["prediction"][1] > 0
    # a model of random weights drafts random tokens: had its drafts been the target's text, all would be accepted
    assert counts["hf-assisted"].accepted <= counts["hf-assisted"].drafted / 5


def test_a_text_may_be_cut(pair: Pair, arms: list[Arm]) -> None:
    (runs,) = measure_speed(pair, arms, PROMPTS[:1], replace(SETTINGS, temperatures=(0.0,), max_new_tokens=7))
    assert all(run.tokens == (written(pair, PROMPTS[0])[:7],) for run in runs)


def test_the_processor_depends_on_the_history_alone() -> None:
    prompts = torch.tensor([[9, 1, 2], [1, 2, 3], [9, 1, 2]])
    replay = Replay(prompts, [[4, 5], [6], [4, 5]], end=0)
    scores = torch.arange(20.0).view(2, 10)

    def alone(*history: list[int]) -> list[list[int]]:
        return [torch.nonzero(row.isfinite()).flatten().tolist() for row in replay(torch.tensor(history), scores)]

    assert alone([9, 1, 2], [1, 2, 3]) == [[4], [6]]
    assert alone([1, 2, 3, 6], [9, 1, 2, 8]) == [[0], [5]]  # a path that is not the text's goes on as the text does
    assert alone([9, 1, 2, 4, 5, 0, 0], [9, 1, 2, 4, 5, 1, 1]) == [[0], [0]]
    kept = replay(torch.tensor([[9, 1, 2], [1, 2, 3]]), scores)
    assert kept[0, 4] == scores[0, 4] and kept[1, 6] == scores[1, 6]
    logits = torch.zeros(3, 2, 10)
    behind = replay.behind(logits, 4)  # rows behind the last token of the prompt and the first new one
    assert behind.isfinite().nonzero()[:, 2].tolist() == [4, 5, 6, 0, 4, 5]


def test_one_prompt_with_two_texts_is_refused_before_anything_is_measured(pair: Pair, arms: list[Arm]) -> None:
    """Nothing tells at which of the texts a history is; each by itself is written as it is."""
    twins = [PROMPTS[0], replace(PROMPTS[0], name="twin", edited="something else")]
    settings = replace(SETTINGS, temperatures=(0.0,), batch_sizes=(1, 2))
    with pytest.raises(
        InvalidParameter, match=r"one prompt and different texts, which cannot be replayed in one batch"
    ):
        next(iter(measure_speed(pair, arms, twins, settings)))
    with pytest.raises(InvalidParameter, match="The rows 0 and 2 have one prompt and different texts"):
        Replay(torch.tensor([[9, 1], [1, 2], [9, 1]]), [[4, 5], [6], [7, 7]], end=0)
    apart = replace(settings, batch_sizes=(1,))
    found = [run.tokens for runs in measure_speed(pair, arms[:1], twins, apart) for run in runs]
    assert sorted(found) == sorted((written(pair, one),) for one in twins)


def test_what_cannot_be_replayed_is_refused(pair: Pair) -> None:
    bare = Prompt("c", "code", "def f(a):")
    with pytest.raises(InvalidParameter, match="the prompt 'c' of code has none"):
        prompts_that_fit(pair, [*PROMPTS, bare], SETTINGS)
    with pytest.raises(InvalidParameter, match="The arm prediction drafts from the file that a row has"):
        check_known([*PROMPTS, bare], replay=False, predicts=True)
    check_known([bare], replay=False)
    with pytest.raises(ContextOverflow, match="leaves room for its text"):
        prompts_that_fit(pair, [replace(PROMPTS[0], edited=EDITED * 60)], SETTINGS)


def test_replayed_runs_are_of_other_conditions() -> None:
    assert SETTINGS.conditions()["replay"] is True and "replay" not in replace(SETTINGS, replay=False).conditions()


def test_a_target_without_an_end_is_refused(pair: Pair, arms: list[Arm], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", None)
    with pytest.raises(InvalidParameter, match="the target names none"):
        list(measure_speed(pair, arms, PROMPTS, SETTINGS))
