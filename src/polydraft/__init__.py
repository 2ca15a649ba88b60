"""polydraft: faster text generation with exactly the same output distribution, by multi-draft speculative decoding."""

from typing import Any

import lazy_loader

__version__ = "0.1.0"
_loaded, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_RENAMED = dict.fromkeys(("BlockDrafter", "EagleDrafter", "MedusaDrafter"), "HeadDrafter")


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise ImportError(f"polydraft.{name} is now polydraft.{_RENAMED[name]}.")
    return _loaded(name)
