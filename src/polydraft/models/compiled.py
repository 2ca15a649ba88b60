"""Short forward passes as compiled code of fixed shapes: what is left of a small model's pass is arithmetic."""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.models.anatomy import anatomy_of, chosen_precision, fits_packed, watch_layers, weights_of
from polydraft.models.cache import SlotView, TreeCache
from polydraft.models.checks.layout import cache_name, evaluating, for_logits, is_offloaded
from polydraft.models.derived import sharing_copy
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import Cache, Forward, Layer
from polydraft.probs import sent

MOST_TOKENS = 128
"""Passes over more tokens than this per row are prompts: they come once, each with a length of its own."""
LEVELS = (8, 16, 32, 64, MOST_TOKENS)
"""Passes of draft models are filled up to these: the levels of a tree share compiled code and one copy of weights."""
SLOTS = 256
"""Key slots are compiled for in multiples of this, doubled until they suffice."""
PLACE = "polydraft_passes"
INDUCTOR = "inductor"
Pass = Callable[..., tuple[Tensor, ...]]
Layers = tuple[Layer, ...]
Shape = tuple[int, int, int, int, Layers]
COMPILE = cast(Callable[..., Any], torch.compile)  # its overloads do not take options as a dictionary


class CompiledPasses:
    """The compiled passes of one model, by batch, tokens, key slots, logits to keep, and hidden states to hand out.

    Args:
        model: the model; it must not change afterwards, since on a CPU its weights become part of the code.
        backend: torch.compile's backend; the others are for tests.

    Raises:
        InvalidParameter: this version of torch cannot keep the compiled shapes of a model apart.
    """

    def __init__(self, model: PreTrainedModel, backend: str = INDUCTOR) -> None:
        if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            raise InvalidParameter(f"Compiling needs torch 2.13 or newer, but this is torch {torch.__version__}.")
        self.model, self.origin = model, _origin(model)
        self.seconds: dict[Shape, float] = {}
        self._passes: dict[Shape, Pass] = {}
        self._watched: dict[Layers, tuple[PreTrainedModel, dict[Layer, Tensor]]] = {(): (model, {})}
        self._options = {"backend": backend, **(_options(model) if backend == INDUCTOR else {})}

    def __call__(
        self, keep: int, layers: Layers, cache: TreeCache, mask: Tensor | dict[str, Tensor | None], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the pass of this shape; the first time it is compiled, which takes seconds to a minute.

        Returns:
            the logits, and the hidden states of these layers.
        """
        tokens, stores = inputs[0], cache.stores
        shape = (tokens.shape[0], tokens.shape[1], cache.shape[2], keep, layers)
        if shape in self._passes:
            return self._passes[shape](mask, *inputs, *stores)
        began = time.perf_counter()
        run: Pass = COMPILE(
            self._body(keep, layers, cache.groups), dynamic=False, isolate_recompiles=True, **self._options
        )
        made = run(mask, *inputs, *stores)
        self._passes[shape] = run
        self.seconds[shape] = time.perf_counter() - began
        return made

    def _body(self, keep: int, layers: Layers, groups: list[list[int]]) -> Pass:
        model, found = self._watched.get(layers) or self._watch(layers)
        extra = {**for_logits(model), **({"logits_to_keep": keep} if keep else {})}
        name = cache_name(self.model)

        def run(
            mask: Tensor | dict[str, Tensor | None], tokens: Tensor, positions: Tensor, slots: Tensor, *stores: Tensor
        ) -> tuple[Tensor, ...]:
            pieces = [store.unbind() for store in stores]
            entries = dict(enumerate(pieces[0]))
            for group, piece in zip(groups, pieces, strict=False):
                entries.update(zip(group, piece, strict=True))
            view = SlotView(entries, slots)
            logits = model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **extra,
                **{name: view},
            ).logits
            return logits, *[found.pop(layer) for layer in layers]

        return run

    def _watch(self, layers: Layers) -> tuple[PreTrainedModel, dict[Layer, Tensor]]:
        """Return a model of the same weights that notes hidden states; compiled code would ask for hooks every time."""
        made, found = sharing_copy(self.model), dict[Layer, Tensor]()
        for holder in (one for one in made.modules() if any(True for _ in one.children())):
            holder.training = False
        watch_layers(made, layers, found)
        self._watched[layers] = made, found
        return made, found

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave compiled code behind when its model is copied or pickled: it belongs to the weights of the original."""
        return type(None), ()


class CompiledModel(HuggingFaceModel):
    """A `HuggingFaceModel` whose short passes run as compiled code; prompts take the plain way.

    Every shape is compiled once per model and process, whoever asks for it. The numbers differ from the plain way's by
    rounding.

    Args:
        model: the model; it must not change afterwards: wrap it anew.
        widths: passes over fewer tokens are filled up to the next of these; () compiles for every number of tokens.
        backend: torch.compile's backend; the others are for tests.

    Raises:
        UnsupportedModel: as `HuggingFaceModel`.
        InvalidParameter: this is no model, or one that scores chains only, or this version of torch cannot keep the
            compiled shapes of a model apart.
    """

    of_one_shape = True

    def __init__(self, model: object, widths: tuple[int, ...] = (), backend: str = INDUCTOR) -> None:
        super().__init__(model)
        if not self.facts.branches:
            raise InvalidParameter(f"{type(self.model).__name__} scores chains only; leave compile out.")
        if self.facts.chooses:
            raise InvalidParameter(
                f"{type(self.model).__name__} has layers that choose what they attend to, which are not compiled; "
                "leave compile out."
            )
        if is_offloaded(self.model):
            raise InvalidParameter(
                f"Weights of this {type(self.model).__name__} are offloaded, so its passes are not compiled; leave "
                "compile out."
            )
        self.widths = widths
        self.passes = _passes_of(self.model, backend)

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> TreeCache:
        """Return an empty cache with at least `capacity` slots per row, of a size that passes are compiled for."""
        slots = SLOTS
        while slots < capacity + (self.widths[-1] if self.widths else 0):
            slots *= 2
        return super().new_cache(batch, slots, sources)

    @torch.no_grad()
    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: Cache,
        starts: Int[Tensor, "b"],
        *,
        hidden_layers: tuple[Layer, ...] = (),
        logits_to_keep: int = 0,
        embeddings: Float[Tensor, "b n d"] | None = None,
        queries: int = 0,
    ) -> Forward:
        """Score tokens under the mask; see `LanguageModel.forward`. Passes that hand out queries are not compiled."""
        width = tokens.shape[1]
        short = isinstance(cache, TreeCache) and cache.stores and width <= MOST_TOKENS
        reads = logits_to_keep and not self.widths  # what is new in a prompt, of a length that will not come again
        if not short or reads or embeddings is not None or queries:
            return super().forward(
                tokens,
                positions,
                mask,
                cache,
                starts,
                hidden_layers=hidden_layers,
                logits_to_keep=logits_to_keep,
                embeddings=embeddings,
                queries=queries,
            )
        cast(TreeCache, cache).check_not_again(starts)
        keys, full = cast(TreeCache, cache), next((one for one in self.widths if one >= width), width)
        keys.place(starts, width, mask.shape[-1], positions)
        filled = (0, full - width)
        seen = torch.nn.functional.pad(mask, (0, keys.shape[2] - mask.shape[-1], *filled), value=False)
        if full > width:
            seen[:, width:, 0] = True  # attention to nothing is not defined
            tokens, positions = (torch.nn.functional.pad(one, filled) for one in (tokens, positions))
        starts = sent(starts, tokens.device)
        slots = (starts.unsqueeze(-1) + torch.arange(full, device=starts.device)).clamp_min(0)
        keep = logits_to_keep if self.cuts_logits and full == width else 0
        with evaluating(self.modules):
            masks = self.all_masks(seen, positions, keys)
            made = self.passes(keep, hidden_layers, keys, masks, tokens, keys.moved(positions).contiguous(), slots)
        hidden: dict[Layer, Tensor] = {
            layer: states[:, :width] for layer, states in zip(hidden_layers, made[1:], strict=True)
        }
        return Forward(made[0][:, :width][:, -logits_to_keep:], hidden)


def draft_model(model: object, *, compile: bool = False) -> HuggingFaceModel:
    """Return the cheaper way to run a draft model: fused if it is of a known anatomy, else its own, compiled if asked.

    Compiling is left to models that cannot be fused, and to GPUs: on a CPU fused passes were the faster ones.

    Raises:
        InvalidParameter: this is no model; the text says what to pass.
        UnsupportedModel: it cannot score trees at all.
    """
    made = HuggingFaceModel(model)
    if compile and (made.fused is None or made.device.type != "cpu"):
        return CompiledModel(made.model, LEVELS)
    return made


def _passes_of(model: PreTrainedModel, backend: str) -> CompiledPasses:
    """Return the passes kept with the model, so that they are compiled once, and anew when the model has changed."""
    kept = model.__dict__.get(PLACE)
    if kept is None or kept.origin != _origin(model):
        kept = model.__dict__[PLACE] = CompiledPasses(model, backend)
    return kept


def _origin(model: PreTrainedModel) -> tuple[object, ...]:
    """Return what compiled code holds for: weights are part of it on a CPU only."""
    return (
        anatomy_of(model),
        chosen_precision(model.device),
        None if model.device.type == "cuda" else weights_of(model),
    )


def _options(model: PreTrainedModel) -> dict[str, Any]:
    """Return what torch.compile is told: graphs on a GPU; on a CPU weights packed into the code if they are small."""
    if model.device.type == "cuda":
        return {"mode": "reduce-overhead"}
    return {"options": {"freezing": True}} if fits_packed(model) else {}
