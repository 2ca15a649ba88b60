"""The target drafting for itself: views of it, and who drafts with them."""

from polydraft.drafters.itself.adapter import AdapterDrafter
from polydraft.drafters.itself.keys import Chunks, Keys, Mass, Recent, Snap
from polydraft.drafters.itself.self_drafter import SelfDrafter, own_model
from polydraft.drafters.itself.view import View

__all__ = ["AdapterDrafter", "Chunks", "Keys", "Mass", "Recent", "SelfDrafter", "Snap", "View", "own_model"]
