"""Tuning a target so that its first layers draft for it (LayerSkip): the tuned one is another model."""
