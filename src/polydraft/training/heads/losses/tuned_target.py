"""Tuning a target together with what drafts for it: adapters of low rank, a loss that keeps its law, and Medusa-2.

An adapter changes a matrix by W' = W + (alpha / rank) B A. B is 0 at first, so that the target begins as it was. Only A
and B learn, and the embeddings of masks. What comes out is another target, with the changes in its matrices: drafts for
it are exact for it, and not for the one that it was.

Sources: LoRA (arXiv 2106.09685), Medusa-2 (2401.10774, section 2.2.3), ctlllll/axolotl (`medusa_utils.py`), which
divides its divergence by all places and the other losses by those that count; here both have one divisor.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int, Shaped
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from polydraft.drafters import Drafter, HeadDrafter, RiderDrafter
from polydraft.drafters.heads.formats.last_state_folders import medusa_inside
from polydraft.drafters.heads.formats.rider_folders import masks_inside
from polydraft.drafters.heads.last_state_heads import MedusaHeads
from polydraft.errors import CheckpointError, UnsupportedModel
from polydraft.models import LanguageModel, tokenizer_of
from polydraft.models.checkpoints.silence import held_back
from polydraft.models.checks.supported import TUNED_FROM
from polydraft.training.heads.losses.last_state_training import MedusaTraining, RowLoss
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds, soft_cross_entropy, weighted

RANK, ALPHA, DROPOUT = 32, 16, 0.05
"""Of adapters, as Medusa's authors have them."""
SHARE = 0.01
"""What heads count beside the divergence of the target from what it was, at the end of the run."""


class Adapted(nn.Module):
    """A linear layer with an adapter.

    Args:
        layer: the layer, which does not learn.
        rank: of the adapter.
        scale: what its change is multiplied by.
        dropout: the chance that a channel of its input is left out while it learns.
    """

    def __init__(self, layer: nn.Linear, rank: int = RANK, scale: float = ALPHA / RANK, dropout: float = DROPOUT):
        super().__init__()
        own = {"bias": False, "device": layer.weight.device, "dtype": torch.float32}
        self.layer, self.scale, self.dropout = layer, scale, nn.Dropout(dropout)
        self.down, self.up = nn.Linear(layer.in_features, rank, **own), nn.Linear(rank, layer.out_features, **own)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Float[Tensor, "*b r"]) -> Float[Tensor, "*b d"]:
        """Return what the changed layer makes of states."""
        made = self.layer(states)
        return made + self.scale * self.up(self.down(self.dropout(states.float()))).to(made)

    def change(self) -> Float[Tensor, "d r"]:
        """Return what the adapter adds to the layer's matrix."""
        return self.scale * self.up.weight.detach() @ self.down.weight.detach()


class AdaptedTarget(nn.Module):
    """A copy of a target with adapters on all of its linear layers, its output rows among them.

    Its parameters are the adapters, and the embeddings of masks. Output rows that are the embeddings become a table of
    their own first, since all other embeddings stay as they are.

    Args:
        target: the target.
        masks: tokens whose embeddings learn too, from what they are.

    Raises:
        UnsupportedModel: its output head is no plain product.
    """

    def __init__(self, target: PreTrainedModel, masks: Sequence[int] = ()) -> None:
        super().__init__()
        copied = untied(target).requires_grad_(False)
        layers = {name: one for name, one in copied.named_modules() if isinstance(one, nn.Linear)}
        adapters = {name: Adapted(one) for name, one in layers.items()}
        for name, one in adapters.items():
            copied.set_submodule(name, one)
        self.hidden = (copied, target, adapters)  # a tuple, so that only adapters are trained and saved
        self.adapters = nn.ParameterList(
            matrix for one in adapters.values() for matrix in (one.down.weight, one.up.weight)
        )
        self.masks, self.embeddings = sorted({*masks}), None
        if masks:
            table = cast(nn.Embedding, copied.get_input_embeddings())
            own = table.weight.detach()[self.masks].float().clone()
            self.embeddings = nn.Embedding.from_pretrained(own, freeze=False)
            table.register_forward_hook(self._with_masks)

    def _with_masks(self, table: nn.Module, given: tuple[Tensor, ...], made: Float[Tensor, "*b d"]) -> Tensor:
        """Return embeddings of tokens, with the learnt ones of masks."""
        same = given[0].unsqueeze(-1) == torch.tensor(self.masks, device=given[0].device)
        own = cast(nn.Embedding, self.embeddings)(same.int().argmax(-1)).to(made)
        return own.where(same.any(-1, keepdim=True), made)

    def train(self, mode: bool = True) -> "AdaptedTarget":
        """Let adapters leave out channels, or not."""
        for one in self.hidden[2].values():
            one.train(mode)
        return super().train(mode)

    def forward(self, ids: Int[Tensor, "b t"]) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t V"]]:
        """Return the adapted target's last hidden states and logits of texts, in single precision."""
        found = self.hidden[0](input_ids=ids.long(), output_hidden_states=True, use_cache=False)
        return found.hidden_states[-1].float(), found.logits.float()

    def output(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Return the adapted target's logits of its last hidden states."""
        head = cast(nn.Module, self.hidden[0].get_output_embeddings())
        return head(states.to(self.hidden[0].dtype)).float()

    def merged(self) -> PreTrainedModel:
        """Return a model with the adapters' changes in its matrices, and the embeddings of masks in its own."""
        made = untied(self.hidden[1])
        with torch.no_grad():
            if self.embeddings is not None:
                cast(nn.Embedding, made.get_input_embeddings()).weight[self.masks] = self.embeddings.weight.to(
                    made.dtype
                )
            for name, one in self.hidden[2].items():
                layer = cast(nn.Linear, made.get_submodule(name))
                layer.weight.copy_(layer.weight.float() + one.change())
        return made


def untied(target: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a target whose output rows are a table of their own.

    Raises:
        UnsupportedModel: its output head is no plain product.
    """
    made = copy.deepcopy(target)
    head = made.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModel(f"{type(target).__name__} cannot be tuned: its output head is no plain product.")
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (made.config, made.config.get_text_config()):
        config.tie_word_embeddings = False
    return made


def divergence(
    logits: Float[Tensor, "b t V"], laws: Float[Tensor, "b t V"], valid: Shaped[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """Return the mean of KL(law || softmax of logits) over the places whose next token counts."""
    values = soft_cross_entropy(logits, laws) + torch.xlogy(laws, laws).sum(-1)
    return weighted(values[:, :-1], valid[:, 1:].to(values))


@dataclass(frozen=True)
class Drift:
    """How far a tuned target is from the one that it was.

    Args:
        divergence: KL(original || tuned) per token, at temperature 1.
        agreement: how often both have the same likeliest next token.
        tokens: of how many tokens.
    """

    divergence: float
    agreement: float
    tokens: int

    @classmethod
    @torch.no_grad()
    def of(
        cls, original: PreTrainedModel, tuned: PreTrainedModel, texts: Dataset[dict[str, Tensor]], most: int = 64
    ) -> "Drift":
        """Measure it on texts, where the original wrote the next token."""
        total, same, count = 0.0, 0, 0
        for place in range(min(most, len(texts))):  # pyright: ignore[reportArgumentType]  shards have a length
            row = texts[place]
            ids, there = row["ids"].long().unsqueeze(0).to(original.device), row["valid"][1:].bool()
            first, second = (one(input_ids=ids, use_cache=False).logits[0, :-1].float() for one in (original, tuned))
            first, second = (one[there.to(one.device)].log_softmax(-1) for one in (first, second))
            total += float((first.exp() * (first - second)).sum())
            same += int((first.argmax(-1) == second.argmax(-1)).sum())
            count += len(first)
        return cls(total / max(count, 1), same / max(count, 1), count)

    def __str__(self) -> str:
        return (
            f"On {self.tokens} held-out tokens KL(original || tuned) is {self.divergence:.4f} per token at "
            f"temperature 1, and {self.agreement:.1%} of the likeliest tokens are the same."
        )


class TunedMedusa(MedusaTraining):
    """Medusa-2: heads alone for half of the steps, and then heads and target together.

    The loss of the second half is KL(original || adapted) + SHARE sin(pi s / 2) sum_i 0.8^i L_i over heads i = 1, 2, ..
    where s is the part of it that is done (self-distillation). Heads have output rows of their own, which begin as the
    original's.

    Args:
        heads: the heads.
        target: the ends of the original.
        adapted: the target with adapters.
        row_loss: as for `MedusaTraining`.
        places: likewise.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: TargetEnds,
        adapted: AdaptedTarget,
        row_loss: RowLoss | None = None,
        places: int | None = None,
    ) -> None:
        super().__init__(heads, target, row_loss=row_loss, places=places)
        self.adapted, self.steps = adapted, 0
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))

    def begin(self, steps: int) -> None:
        """Know how many steps the run has."""
        self.steps = steps

    def slow(self) -> Sequence[nn.Parameter]:
        """Return the adapters: heads learn at four times their rate."""
        return [*self.adapted.adapters]

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all heads, and in the second half of a run that of the target."""
        done = int(self.get_buffer("done"))
        if self.training:
            self.get_buffer("done").add_(1)
            if 2 * done < self.steps:
                return super().learn(batch)
        final, logits = self.adapted(batch.ids)
        found = super().learn(replace(batch, final=final, lse=logits.detach().logsumexp(-1)))
        part = min(max(2 * done / max(self.steps, 1) - 1, 0), 1)
        kept = divergence(logits, self.target[0].laws(batch.final.float(), batch.lse), batch.valid)
        return found | {"loss": kept + SHARE * math.sin(math.pi / 2 * part) * self.decay * found["loss"]}

    @torch.no_grad()
    def laws(self, final: Float[Tensor, "*b d"], total: Float[Tensor, "*b"]) -> Float[Tensor, "*b V"]:
        """Return the adapted target's laws, which heads draft for."""
        return self.adapted.output(final).softmax(-1)


def medusa_of(drafter: HeadDrafter[MedusaHeads]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and tensors of Medusa's heads inside a whole model (layout B)."""
    return medusa_inside(drafter.network)


def masks_of(drafter: RiderDrafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings of a model that was tuned to fill in masks, which has no more tensors than any other."""
    return masks_inside(drafter), {}


Drafts = TypeVar("Drafts", bound=Drafter)


def write_tuned(
    adapted: AdaptedTarget,
    inside: Callable[[Drafts], tuple[Mapping[str, Any], Mapping[str, Tensor]]],
    drafter: Drafts,
    folder: Path,
    target: LanguageModel,
    *,
    card: str = "",
) -> None:
    """Write a tuned target as a whole model, with what drafts for it inside and the tokenizer of the original.

    Args:
        inside: what its configuration and its tensors have of the drafter.

    Raises:
        CheckpointError: it cannot be written.
    """
    model, (settings, tensors) = adapted.merged(), inside(drafter)
    for name, value in settings.items():
        setattr(model.config, name, value)
    weights = {**model.state_dict(), **{name: value.to(model.dtype).contiguous() for name, value in tensors.items()}}
    original = adapted.hidden[1]
    save_whole(model, folder, original, card, weights, Path(original.name_or_path or "").name or "its first form")


def save_whole(
    model: PreTrainedModel,
    folder: Path,
    original: PreTrainedModel,
    card: str,
    weights: dict[str, Tensor] | None = None,
    tuned_from: str = "",
) -> None:
    """Write a tuned model with its card, and with the tokenizer of the original.

    Args:
        tuned_from: what it was before, if it is another model now, which it says wherever it is a target.
        weights: what to write in the room of the model's own, None for these.

    Raises:
        CheckpointError: it cannot be written.
    """
    tokenizer = tokenizer_of(original)
    if tuned_from:
        setattr(model.config, TUNED_FROM, tuned_from)
    try:
        with held_back():
            model.save_pretrained(folder, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The tuned target cannot be written to {folder}: {error}.") from error
