"""TRL: rollouts by polydraft are the trainer's own texts, with the log-probabilities that it computes itself."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="make test-ecosystem installs TRL")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polydraft.errors import InvalidParameter
from polydraft.integrations.trl import Rollouts
from polydraft.models.loading import SHIPPED

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
TARGET, DRAFT = SHIPPED["pair"], SHIPPED["pair-draft"]
TEXTS = ["def read(path):\n", "import os\n", "class Point:\n", "for line in "]
TALK = [[{"role": "user", "content": text}] for text in TEXTS]
TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
NEW, EACH, STEPS = 12, 4, 2


class Made:
    """A trainer of few steps, and the texts that its rewards saw."""

    def __init__(self, out: Path, rollouts: Any, prompts: list[Any] = TEXTS, **changes: Any) -> None:
        self.texts: list[list[str]] = []
        settings: dict[str, Any] = {
            "output_dir": str(out), "report_to": "none", "use_cpu": True, "max_steps": STEPS, "save_strategy": "no",
            "per_device_train_batch_size": 2 * EACH, "num_generations": EACH, "max_completion_length": NEW,
            "learning_rate": 1e-4, "seed": 0, "bf16": False, "logging_steps": 1, "disable_tqdm": True,
        }  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(TARGET, pad_token="<|endoftext|>", padding_side="left")
        tokenizer.chat_template = TEMPLATE
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(TARGET),
            reward_funcs=self.reward,
            args=GRPOConfig(**{**settings, **changes}),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollouts,
        )

    def reward(self, completions: list[Any], **_: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        self.texts.append(texts)
        return [float(len({*text})) for text in texts]


GREEDY = {"generation_kwargs": {"do_sample": False}}


@pytest.mark.parametrize("prompts", [TEXTS, TALK], ids=["texts", "conversations"])
def test_greedy_rollouts_are_the_trainers_own_texts(prompts: list[Any], tmp_path: Path) -> None:
    rollouts = Rollouts(drafter=str(DRAFT))
    ours, theirs = Made(tmp_path, rollouts, prompts, **GREEDY), Made(tmp_path, None, prompts, **GREEDY)
    ours.trainer.train()
    theirs.trainer.train()
    assert ours.texts == theirs.texts and len(ours.texts) == STEPS
    assert rollouts.statistics.lossless and rollouts.statistics.accepted > 0


def test_sampled_rollouts_have_the_log_probabilities_that_the_trainer_computes(tmp_path: Path) -> None:
    made = Made(tmp_path, Rollouts(drafter="ngram"), off_policy_mask_threshold=0.5)
    told: list[dict[str, Any]] = []
    own = made.trainer.rollout_func

    def noted(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = own(prompts, trainer)
        text = [
            torch.tensor([[*first, *then]])
            for first, then in zip(found["prompt_ids"], found["completion_ids"], strict=True)
        ]
        with torch.no_grad():
            scored = [trainer.model(ids).logits[0].double().log_softmax(-1) for ids in text]
        found["scored"] = [
            rows[len(first) - 1 : -1].gather(-1, torch.tensor(then)[:, None])[:, 0].tolist()
            for rows, first, then in zip(scored, found["prompt_ids"], found["completion_ids"], strict=True)
        ]
        told.append(found)
        return {name: value for name, value in found.items() if name != "scored"}

    made.trainer.rollout_func = noted
    before = [one.clone() for one in made.trainer.model.parameters()]
    made.trainer.train()
    assert len(told) == STEPS and any(
        not torch.equal(one, now) for one, now in zip(before, made.trainer.model.parameters(), strict=True)
    )
    for found in told:  # the second with weights that a step has changed
        for mine, scored, tokens in zip(found["logprobs"], found["scored"], found["completion_ids"], strict=True):
            assert len(tokens) <= NEW and mine == pytest.approx(scored, abs=1e-4)
    assert len({text for texts in made.texts for text in texts}) > EACH


def test_at_another_temperature_and_in_half_precision_the_trainer_scores_itself(tmp_path: Path) -> None:
    rollouts = Rollouts("none")
    made = Made(tmp_path, rollouts, temperature=0.7, bf16=True)
    found = rollouts(TEXTS, made.trainer)
    assert found["logprobs"] is None and len(found["completion_ids"] or ()) == len(TEXTS)
    made.trainer.train()
    assert rollouts.statistics.drafted == 0 < rollouts.statistics.new_tokens


def vllm(trainer: Any) -> None:
    trainer.use_vllm = True


def environments(trainer: Any) -> None:
    trainer.environment_factories = {None: object}


def spread(trainer: Any) -> None:
    trainer.is_fsdp_enabled = True


@pytest.mark.parametrize(
    ("change", "said"), [(vllm, "use_vllm=True"), (environments, "environments"), (spread, "FSDP")]
)
def test_what_rollouts_cannot_do_is_refused(change: Callable[[Any], None], said: str) -> None:
    trainer = SimpleNamespace(use_vllm=False, environment_factories=None, is_fsdp_enabled=False)
    change(trainer)
    with pytest.raises(InvalidParameter, match=f"Rollouts cannot write here, since .*{said}"):
        Rollouts()(TEXTS, trainer)


def test_prompts_with_images_are_refused() -> None:
    trainer = SimpleNamespace(
        use_vllm=False, environment_factories=None, is_fsdp_enabled=False,
        processing_class=lambda text: {"input_ids": [[1]], "attention_mask": [[1]], "pixel_values": [0]},
    )  # fmt: skip
    with pytest.raises(InvalidParameter, match="prompts have pixel_values"):
        Rollouts()(["a"], trainer)
