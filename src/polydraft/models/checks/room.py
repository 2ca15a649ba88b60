"""Whether the keys of a batch fit into memory, and how large they are."""

from collections.abc import Sequence

from polydraft.errors import InvalidParameter
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import LanguageModel
from polydraft.models.memory import free_bytes

GIB = 1 << 30


def cache_bytes(model: HuggingFaceModel, capacity: int) -> int:
    """Return the bytes of one row: those of all keys and values in `capacity` slots, and those of states.

    What a decoder keeps of an encoder's states depends on these, and is not counted.
    """
    found = model.kept
    if found.numbers or found.remembered:
        return found.numbers * capacity * model.model.dtype.itemsize + found.remembered
    config = model.model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return 2 * model.layers * kept * capacity * width * model.model.dtype.itemsize


def check_memory(models: Sequence[LanguageModel], batch: int, capacity: int) -> None:
    """Check that the caches of a batch fit into the free memory, as far as the models' caches are known.

    Raises:
        InvalidParameter: they do not; the text says how much is needed, how much is free, and how many rows fit.
    """
    known = [model for model in models if isinstance(model, HuggingFaceModel)]
    each = sum(cache_bytes(model, capacity) for model in known)
    free = min((free_bytes(model.device) for model in known), default=0)
    if each * batch > free:
        fit = free // each
        raise InvalidParameter(
            f"A batch of {batch} texts of up to {capacity} tokens needs {each * batch / GIB:.1f} GiB for keys and "
            f"values, but {free / GIB:.1f} GiB are free: "
            + (f"{fit} would fit." if fit else "not even one fits; ask for fewer new tokens.")
        )
