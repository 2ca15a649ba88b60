"""What a decoding method returns to `model.generate`, and so to whoever called that, such as a pipeline."""

from collections.abc import Mapping
from typing import Any, cast

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

NAMES = ("sequences", "scores", "logits")


def as_hugging_faces(found: Mapping[str, Any], *, encodes: bool) -> Any:
    """Return an output of Hugging Face's own class, which pipelines and models' own `generate` take apart.

    What Hugging Face has no name for, such as statistics, is an attribute and no field.

    Args:
        found: the output by name.
        encodes: whether the model has an encoder.
    """
    kind: Any = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
    made = kind(**cast(Any, {name: found.get(name) for name in NAMES}))
    for name, value in found.items():
        if name not in NAMES:
            setattr(made, name, value)
    return made
