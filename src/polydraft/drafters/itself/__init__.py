"""The target drafting for itself: views of it, and who drafts with them."""

from polydraft.drafters.itself.adapter import AdapterDrafter
from polydraft.drafters.itself.keys import Chunks, Keys, Mass, Recent, Snap
from polydraft.drafters.itself.self_drafter import SelfDrafter, own_model
from polydraft.drafters.itself.skip_programme import tokens_per_work
from polydraft.drafters.itself.skipping import SkippingDrafter
from polydraft.drafters.itself.view import View

__all__ = [
    "AdapterDrafter",
    "Chunks",
    "Keys",
    "Mass",
    "Recent",
    "SelfDrafter",
    "SkippingDrafter",
    "Snap",
    "View",
    "own_model",
    "tokens_per_work",
]
