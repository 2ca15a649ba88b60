"""Aligning a draft with its target: losses of rows, expected calls on the target's own text, and their measurement."""
