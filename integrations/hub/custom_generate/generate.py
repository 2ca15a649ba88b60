"""Text by polydraft in place of a model's own `generate`: drafts, and exactly the model's distribution."""

from typing import Any

try:  # else transformers itself tells to install the name from an index, on which polydraft is not
    import polydraft
    from polydraft.models import as_hugging_faces
except ImportError:
    polydraft = as_hugging_faces = None


def generate(inputs: Any = None, generation_config: Any = None, *, model: Any, **options: Any) -> Any:
    """Generate text for `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

    Arguments are those of Hugging Face's `generate` and of `polydraft.generate`, which honours each or refuses it by
    name; `streamer`, `assistant_model` and `tokenizer` with `stop_strings` arrive here, too.

    Args:
        inputs: the prompts, if they are not given by their name.
        generation_config: Hugging Face's; None is the model's own.
        model: the target.
        **options: the other arguments.

    Returns:
        the tokens, or with return_dict_in_generate an output of Hugging Face's class, with `statistics` as attribute.

    Raises:
        ImportError: polydraft is not installed.
    """
    if polydraft is None:
        raise ImportError("This way of generating needs polydraft: see the Install section of its README.")
    if "custom_generate" in options:  # a folder with weights is its model's `generate`, and polydraft calls that, too
        return type(model).generate(model, inputs, generation_config, **options)
    output = polydraft.generate(model, inputs=inputs, generation_config=generation_config, **options)
    configs = (generation_config, model.generation_config)
    asked = [
        options.get("return_dict_in_generate"),
        *(getattr(one, "return_dict_in_generate", None) for one in configs),
    ]
    if not next((one for one in asked if one is not None), False):
        return output.sequences
    return as_hugging_faces(dict(output.items()), encodes=model.config.is_encoder_decoder)
