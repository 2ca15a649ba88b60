"""Rollouts of TRL's GRPO with drafts: `GRPOTrainer(..., rollout_func=polydraft.integrations.trl.Rollouts())`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from polydraft.drafters import Drafter
from polydraft.engine import GenerationOutput, Statistics, generate, summed
from polydraft.engine.choices import chosen_drafter
from polydraft.errors import InvalidParameter, MissingExtra
from polydraft.models import HuggingFaceModel

try:
    from trl.models import unwrap_model_for_generation  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtra(f'Rollouts need TRL ({error}): pip install "trl>=1.16".') from error

READ = {"input_ids", "attention_mask"}


class Rollouts:
    """Texts of the policy that is being trained, one for each prompt that TRL hands over, with exactly its law.

    The trainer's own settings hold: lengths, temperature, filters, `generation_kwargs`. Drafts come from the policy's
    newest weights where a drafter reads them; a draft model of older ones accepts less and changes no text's law.

    TRL asks for the log-probabilities of the tokens, as it computes them itself: those of the logits over the
    temperature, without filters. At temperature 1, its default, they are the model's own, which generation has. At
    others there are none, and the trainer scores the texts where it needs that, as it does without rollouts.

    Args:
        drafter: a drafter, or a draft model, its folder or hub name, or a word, as for `polydraft.generate`.
        verifier: the rule that keeps drafts, or its word.
        policy: the tree.
    """

    def __init__(
        self,
        drafter: Drafter | nn.Module | str | Path | None = None,
        verifier: Any = None,
        policy: Any = None,
    ) -> None:
        self._drafter, self._rule_and_tree = drafter, {"verifier": verifier, "policy": policy}
        self.statistics = Statistics()
        """Those of all texts so far."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any] | None]:
        """Return `prompt_ids`, `completion_ids` and `logprobs`, rows in the order of the prompts.

        Args:
            prompts: texts, or conversations.
            trainer: TRL's `GRPOTrainer`.

        Raises:
            InvalidParameter: the trainer writes with vLLM, by environments, or with weights that are spread over
                devices; or prompts hold more than text.
        """
        _check_trainer(trainer)
        ids = prompt_ids(prompts, trainer)
        width, pad = max(map(len, ids)), trainer.generation_config.pad_token_id
        rows = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                generation_kwargs=trainer.generation_kwargs,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            trainer.accelerator.autocast(),  # the precision in which the trainer scores texts
            torch.no_grad(),
        ):
            output = self._written(model, rows, mask, trainer.generation_config)
        self.statistics = summed([self.statistics, output.statistics])
        told = output.logprobs or ()
        raw = trainer.generation_config.temperature in (None, 1.0)
        return {
            "prompt_ids": ids,
            "completion_ids": [[place.token for place in row] for row in told],
            "logprobs": [[place.logprob for place in row] for row in told] if raw else None,
        }

    def _written(self, model: Any, rows: Tensor, mask: Tensor, config: Any) -> GenerationOutput:
        if isinstance(self._drafter, str | Path | nn.Module):  # loaded or wrapped once, for all steps
            self._drafter = chosen_drafter(self._drafter, HuggingFaceModel(model))
        given = {"input_ids": rows.to(model.device), "attention_mask": mask.to(model.device)}
        options = {"generation_config": config, "output_logprobs": 0, "drafter": self._drafter, **self._rule_and_tree}
        return cast(GenerationOutput, generate(model, given, **options))


def prompt_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Return the tokens of prompts: of texts as they are, of conversations by the trainer's chat template.

    Raises:
        InvalidParameter: a conversation holds more than text.
    """
    if isinstance(prompts[0], str):
        read: Mapping[str, Any] = trainer.processing_class(text=list(prompts))
    else:
        read = trainer.processing_class.apply_chat_template(
            conversation=list(prompts),
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
    beside = sorted(read.keys() - READ)
    if beside:
        raise InvalidParameter(f"Rollouts read text alone, but prompts have {beside[0]}; leave rollout_func out.")
    return [list(row) for row in read["input_ids"]]


def _check_trainer(trainer: Any) -> None:
    spread = "FSDP spreads the weights over devices" if trainer.is_fsdp_enabled else ""
    places = "texts come from environments" if getattr(trainer, "environment_factories", None) else ""
    reason = "the trainer has use_vllm=True" if trainer.use_vllm else spread or places
    if reason:
        raise InvalidParameter(f"Rollouts cannot write here, since {reason}; leave that or rollout_func out.")
