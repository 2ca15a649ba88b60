"""LayerSkip's training: layers that are left out now and then, and a loss behind many of them.

Layers are counted from 0 to N - 1; the exit behind layer l runs l + 1 layers, the target's last norm and its head.

    dropout       layer l is left out of a text's pass with probability p_max (exp(l ln 2 / (N - 1)) - 1)
    loss          sum_l w_l CE(head(norm h_l)),  w_l ~ e s(l) for l < N - 1, s(N - 1) for the last; they add up to 1
    scales s      linear: l + 1;  sqrt: root of l + 1;  sum: the sum of l' + 1 over the exits l' <= l that learn
    curricula     which exits learn at step k of K; the last always does
      none          every R-th layer
      rotational    these moved on by one layer with every step, in a circle
      gradual       of these, those with (k - 1) / K >= (N - l) / 2N: from the last down, all by half of the steps

Sources: LayerSkip (arXiv 2404.16710); pytorch/torchtune, `modules/layer_dropout.py` and `modules/early_exit_loss.py`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.anatomy import layers_of
from polydraft.models.fused.blueprint import LAST_NORMS
from polydraft.training.heads.losses.row_losses import HeadBatch, HeadTraining, TargetEnds, agreement, weighted

SCALES = ("sum", "linear", "sqrt")
CURRICULA = ("rotational", "gradual", "none")
EVERY = 4
"""Of so many layers one learns at a step where exits rotate, unless another number is named; else all do."""
TRIED, TOLERANCE = 4, 0.02
"""On how many tokens the last exit is compared with the model, and how far logits may be apart, of the largest."""


@dataclass(frozen=True)
class ExitSettings:
    """How exits learn.

    Args:
        dropout: p_max, the probability of the last layer.
        scale: one of `SCALES`.
        early: e, what exits before the last are multiplied by.
        curriculum: one of `CURRICULA`.
        every: R; None for 4 where exits rotate, else 1.

    Raises:
        InvalidParameter: a probability outside of [0, 1), a negative factor, or another word.
    """

    dropout: float = 0.2
    scale: str = "sum"
    early: float = 1.0
    curriculum: str = "rotational"
    every: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InvalidParameter(f"dropout is a probability in [0, 1), but is {self.dropout}.")
        if not 0 <= self.early < math.inf:
            raise InvalidParameter(f"early is a finite factor of 0 or more, but is {self.early}.")
        for name, value, words in (("scale", self.scale, SCALES), ("curriculum", self.curriculum, CURRICULA)):
            if value not in words:
                raise InvalidParameter(f"{name} is {', '.join(words)}, not {value!r}.")
        if self.every is not None and self.every < 1:
            raise InvalidParameter(f"every must be at least 1, but is {self.every}.")

    def rate(self, layer: int, layers: int) -> float:
        """Return the probability that a layer is left out of a text's pass."""
        return self.dropout * (math.exp(layer * math.log(2) / (layers - 1)) - 1 if layers > 1 else 1)

    def exits(self, step: int, steps: int, layers: int) -> tuple[int, ...]:
        """Return the layers whose exits learn at a step, counted from 0, in rising order; the last is among them."""
        every = self.every or (EVERY if self.curriculum == "rotational" else 1)
        shift = step if self.curriculum == "rotational" else 0
        found = [layer for layer in range(layers) if (layer - shift) % layers % every == 0]
        if self.curriculum == "gradual":
            found = [one for one in found if step and (step - 1) / steps >= 0.5 * (layers - one) / layers]
        return tuple(sorted({*found, layers - 1}))

    def weights(self, exits: Sequence[int], layers: int) -> Float[Tensor, " e"]:
        """Return what the losses of some exits count, in rising order."""
        counts = torch.tensor([*exits], dtype=torch.float64) + 1
        found = {"linear": counts, "sqrt": counts.sqrt(), "sum": counts.cumsum(0)}[self.scale]
        found = found * torch.where(counts < layers, self.early, 1.0)
        return found / found.sum()


class ExitTraining(HeadTraining):
    """A copy of a target, in single precision, with LayerSkip's loss; its weights are all that learns.

    Args:
        target: the target, which stays as it is.
        settings: how exits learn.

    Raises:
        UnsupportedModel: its layers are not in one list, or its rows do not follow from its last norm and its head.
    """

    def __init__(self, target: PreTrainedModel, settings: ExitSettings = ExitSettings()) -> None:
        super().__init__(TargetEnds.of(target))
        copied = copy.deepcopy(target).float().requires_grad_(True)
        self.settings, self.steps = settings, 1
        self.hidden = (copied, target)  # a tuple, so that weights that are one are trained and saved once
        self.tuned_weights = nn.ParameterList(copied.parameters())
        self.seen = dict[int, Tensor]()
        self.layers = len(layers_of(copied))
        for number, layer in enumerate(layers_of(copied)):
            layer.register_forward_hook(self._dropping(number), with_kwargs=True)
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))
        self.eval()
        self._check()

    def _dropping(self, number: int) -> Callable[..., Any]:
        """Return what leaves a layer out of some texts' passes while the model learns, and notes its output."""

        def behind(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            states = output if isinstance(output, Tensor) else output[0]
            rate = self.settings.rate(number, self.layers) if self.training else 0.0
            if rate:
                left_out = torch.rand(len(states), 1, 1, device=states.device) < rate
                states = torch.where(left_out, given[0] if given else named["hidden_states"], states)
            self.seen[number] = states
            return states if isinstance(output, Tensor) else (states, *output[1:])

        return behind

    @torch.no_grad()
    def _check(self) -> None:
        (model, _), decoder = self.hidden, self.hidden[0].get_decoder()
        ids = torch.arange(TRIED, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
        named = [name for name in LAST_NORMS if getattr(decoder, name, None) is not None]
        self.norm = named[0] if named else ""
        wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        found = self.logits(self.layers - 1)
        self.seen.clear()
        if float((found - wanted).abs().max()) > TOLERANCE * float(wanted.abs().max()):
            raise UnsupportedModel(
                f"{type(model).__name__} has no exits: its rows are no product of its normed states."
            )

    def run(self, ids: Int[Tensor, "b t"]) -> None:
        """Run all layers over texts, and note their outputs."""
        self.hidden[0].get_decoder()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def logits(self, layer: int, places: slice = slice(None)) -> Float[Tensor, "b t V"]:
        """Return the rows of the exit behind a layer, at some places of the texts that were run last."""
        decoder: Any = self.hidden[0].get_decoder()
        states = self.seen[layer][:, places]
        states = getattr(decoder, self.norm)(states) if self.norm else states
        return cast(nn.Module, self.hidden[0].get_output_embeddings())(states)

    def begin(self, steps: int) -> None:
        """Know how many steps the run has, by which the gradual curriculum goes."""
        self.steps = steps

    def slow(self) -> Sequence[nn.Parameter]:
        """Return the tables: embeddings and output rows, which no matrix of a layer is."""
        ends = (self.hidden[0].get_input_embeddings(), self.hidden[0].get_output_embeddings())
        tables = {id(one): one for end in ends for one in cast(nn.Module, end).parameters() if one.dim() > 1}
        return [*tables.values()]

    def train(self, mode: bool = True) -> "ExitTraining":
        """Let layers be left out, or not."""
        self.hidden[0].train(mode)
        return super().train(mode)

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the loss; where nothing learns, that of the last exit, and each earlier one's overlap with its row."""
        self.run(batch.ids)
        there, labels, places = batch.valid[:, 1:].float(), batch.ids[:, 1:], slice(0, batch.ids.shape[1] - 1)
        last, count = self.layers - 1, there.sum().expand(self.layers - 1)
        nothing = torch.zeros(last, device=there.device)
        if self.training:
            exits = self.settings.exits(int(self.get_buffer("done")), self.steps, self.layers)
            self.get_buffer("done").add_(1)
            losses = [weighted(_nats(self.logits(one, places), labels), there) for one in exits]
            weights = self.settings.weights(exits, self.layers).to(losses[0])
            found = {"loss": (weights * torch.stack(losses)).sum(), "overlap": nothing, "count": 0 * count}
        else:
            rows = self.logits(last, places)
            laws = rows.softmax(-1)
            overlaps = [weighted(agreement(self.logits(one, places), laws), there) for one in range(last)]
            overlap = torch.stack(overlaps) if overlaps else nothing
            found = {"loss": weighted(_nats(rows, labels), there), "overlap": overlap, "count": count}
        self.seen.clear()
        return found

    @torch.no_grad()
    def tuned(self) -> PreTrainedModel:
        """Return a model with the weights that were learnt, in the precision of the target."""
        made = copy.deepcopy(self.hidden[1])
        for place, value in zip(made.parameters(), self.tuned_weights, strict=True):
            place.copy_(value)
        return made


def _nats(logits: Float[Tensor, "b t V"], labels: Int[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@dataclass(frozen=True)
class ExitQuality:
    """What a model and its exits are like on held-out text.

    Args:
        perplexity: of the whole model.
        overlap: behind 1, 2, ... layers, the mean overlap of the exit's row with the model's: how often a draft would
            be accepted at temperature 1, given the text's own tokens above it.
        tokens: of how many tokens.
    """

    perplexity: float
    overlap: tuple[float, ...]
    tokens: int

    @classmethod
    @torch.no_grad()
    def of(
        cls, training: ExitTraining, texts: Dataset[dict[str, Tensor]], most: int = 64, batch: int = 4
    ) -> "ExitQuality":
        """Measure the first texts."""
        training.eval()
        nats, shared, tokens = 0.0, torch.zeros(training.layers - 1), 0
        device, size = next(training.parameters()).device, min(most, len(texts))  # pyright: ignore[reportArgumentType]  shards have a length
        for first in range(0, size, batch):
            rows = [texts[place] for place in range(first, min(first + batch, size))]
            found = training(**{name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]})
            count = int(sum(int(row["valid"][1:].sum()) for row in rows))
            nats, tokens = nats + float(found["loss"]) * count, tokens + count
            shared += found["overlap"].cpu() * count
        return cls(math.exp(nats / max(tokens, 1)), tuple((shared / max(tokens, 1)).tolist()), tokens)
