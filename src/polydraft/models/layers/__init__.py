"""Layers of a model's own classes, for weights that its checkpoint holds beside its own."""
