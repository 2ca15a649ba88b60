"""What rows read beside their text, of what Hugging Face's `generate` prepared."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.models.sources.encoded import encoded_rows
from polydraft.models.sources.inputs import MADE_INSIDE, beside_text
from polydraft.models.sources.prompts import Door, read_prompts

KEPT = ("attention_mask", "position_ids", "logits_to_keep", "use_cache")
"""What `model.generate` made that its first pass takes."""


def _check_padding(target: Door, begun: Int[Tensor, "b t"], mask: Tensor | None) -> None:
    """Check that a text does not begin with padding inside, which some decoders do not count.

    Raises:
        InvalidParameter: it does, and the model is such.
    """
    if target.uncounted is None:
        return
    inside = begun[:, 1:] == target.uncounted
    if bool((inside if mask is None else inside & mask[:, 1:].bool().to(inside.device)).any()):
        raise InvalidParameter(
            f"decoder_input_ids has the padding token {target.uncounted} inside, which {type(target.model).__name__} "
            "does not count as a place; leave it out, or say by decoder_attention_mask that it is padding."
        )


def sources_of(
    target: Door, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any], read: Tensor | None
) -> Sequence[Any] | None:
    """Return the source of each row: what an encoder made, or a prompt with images that was read; None for text alone.

    Args:
        target: the model.
        input_ids: the beginning of each row's text, padded.
        prepared: the model's inputs.
        read: what an encoder read; None if that is not known.

    Raises:
        UnsupportedModel: prompts with images cannot be read, or a text cannot go on from them.
    """
    if target.encodes:
        _check_padding(target, input_ids, prepared.get("decoder_attention_mask"))
        return encoded_rows(target.model, len(input_ids), prepared, read)
    if not beside_text(target.model, prepared):
        return None
    own = {name: value for name, value in prepared.items() if name in KEPT or name not in MADE_INSIDE}
    return read_prompts(target, input_ids, own)
