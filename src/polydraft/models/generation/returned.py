"""What a decoding method returns to `model.generate`, where that goes on with it."""

from collections.abc import Mapping
from typing import Any, cast

from transformers.generation.utils import GenerateEncoderDecoderOutput

NAMES = ("sequences", "scores", "logits")


def as_hugging_faces(found: Mapping[str, Any]) -> Any:
    """Return an output as Hugging Face's, for a model whose own `generate` cuts outputs into rows, such as Whisper's.

    What Hugging Face has no name for, such as statistics, is an attribute and no field.
    """
    made: Any = GenerateEncoderDecoderOutput(**cast(Any, {name: found.get(name) for name in NAMES}))
    for name, value in found.items():
        if name not in NAMES:
            setattr(made, name, value)
    return made
