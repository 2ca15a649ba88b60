"""Drafters of fixed tokens, which need no model of their own: they know them from text and from earlier steps."""
