"""Heads that walk: no keys are kept, and a small state of each node follows from its parent's and its token."""
