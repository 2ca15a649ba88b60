"""How transformers is asked for the weights of a GGUF file."""

from typing import Any

import transformers


def unpacked() -> dict[str, Any]:
    """Return the options by which weights are unpacked as they are loaded.

    Newer versions of transformers may leave them packed, for kernels that compute a little differently.
    """
    packing = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": packing(dequantize=True)} if packing else {}
