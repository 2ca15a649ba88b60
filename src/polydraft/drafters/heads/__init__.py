"""Draft heads: drafters trained on the hidden states of their target."""

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, HeadNetwork, TreePass

__all__ = ["HeadDrafter", "HeadEnds", "HeadNetwork", "TreePass"]
