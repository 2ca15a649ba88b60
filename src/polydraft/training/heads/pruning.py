"""A head that begins as some of its target's layers (pruned initialisation), and a trial that it computes what they do.

Source: SPIRe (arXiv 2504.06419).
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from polydraft.drafters.heads.formats.folder_fields import Fields
from polydraft.drafters.heads.sublayers import Anatomy, Layer
from polydraft.drafters.itself.spire import SINKS, WINDOW, SpireHead
from polydraft.errors import CheckpointError, UnsupportedModel
from polydraft.models.anatomy import layers_of
from polydraft.training.heads.new_heads import last_norm

EVERY = 3
"""Of so many layers one is kept."""
TRIED, TOLERANCE = 4, 0.02
"""On how many tokens layers are compared, and how far states may be apart, relative to the largest; bfloat16 rounds."""
OTHER_KIND = "No head can begin as layers of {}: they are not of Llama's or Qwen's kind."


def pruned(
    target: PreTrainedModel,
    layers: int | None = None,
    sinks: int = SINKS,
    window: int | None = WINDOW,
    *,
    feedback: bool = True,
    begun: bool = True,
) -> SpireHead:
    """Return a head with L of a target's N layers: those of the numbers floor(i N / L), i = 0, ..., L - 1.

    Args:
        target: the target, whose layers are of Llama's, Qwen's or Mistral's kind.
        layers: L; None for every third.
        sinks: as for `SpireHead`.
        window: likewise.
        feedback: likewise.
        begun: whether its weights begin as the target's; else they are new.

    Raises:
        UnsupportedModel: the target's layers are of another kind, or it has fewer than that.
    """
    own, name = layers_of(target), type(target).__name__
    count = layers or -(-len(own) // EVERY)
    if count > len(own):
        raise UnsupportedModel(f"A head of {count} layers cannot begin as layers of {name}, which has {len(own)}.")
    norm, (anatomy, told) = last_norm(target), _anatomy_of(target)
    head = SpireHead(anatomy, count, sinks, window, feedback=feedback)
    first = {name: one.shape for name, one in head.layers[0].state_dict().items()}
    if norm is None or first != told or not _is_alike(target, anatomy):
        raise UnsupportedModel(OTHER_KIND.format(name))
    if begun:
        for number, layer in enumerate(head.layers):
            layer.load_state_dict(own[number * len(own) // count].state_dict())
        with torch.no_grad():
            head.norm.weight.copy_(norm)
    return head.float()


def _anatomy_of(target: PreTrainedModel) -> tuple[Anatomy, dict[str, torch.Size]]:
    """Return the sizes of a target's layers, and the shapes of the first one's weights."""
    shapes = {name: one.shape for name, one in layers_of(target)[0].state_dict().items()}
    if not shapes.keys() >= {"self_attn.q_proj.weight", "mlp.gate_proj.weight"}:
        raise UnsupportedModel(OTHER_KIND.format(type(target).__name__))
    fields = Fields("the target", target.config.get_text_config().to_dict())
    try:
        found = fields.anatomy(normed="self_attn.q_norm.weight" in shapes)
    except CheckpointError as error:
        raise UnsupportedModel(f"No head can begin as layers of {type(target).__name__}: {error}") from error
    bias, output = "self_attn.q_proj.bias" in shapes, "self_attn.o_proj.bias" in shapes
    return replace(found, bias=bias, output_bias=output), shapes


@torch.no_grad()
def _is_alike(target: PreTrainedModel, anatomy: Anatomy) -> bool:
    """Tell whether our layer, with the weights of the target's first, makes the same states of a few tokens."""
    ids = torch.arange(TRIED, device=target.device).unsqueeze(0) % target.config.get_text_config().vocab_size
    seen = torch.ones_like(ids)
    states = target(input_ids=ids, attention_mask=seen, output_hidden_states=True, use_cache=False).hidden_states
    if len(states) < 3:  # the only layer's output is handed out behind the last norm
        return True
    layer, weights = Layer(anatomy), layers_of(target)[0].state_dict()
    if {name: one.shape for name, one in layer.state_dict().items()} != {
        name: one.shape for name, one in weights.items()
    }:
        return False
    layer.load_state_dict(weights)
    layer.to(target.device, target.dtype)
    mask = torch.ones(1, TRIED, TRIED, dtype=torch.bool, device=target.device).tril()
    made = layer(states[0], anatomy.turn(ids, states[0].dtype), lambda keys, values: (keys, values), mask)
    return float((made - states[1]).abs().max()) <= TOLERANCE * float(states[1].abs().max())
