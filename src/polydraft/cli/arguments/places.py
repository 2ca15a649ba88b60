"""Checks of places, for options that are not made of dataclasses yet."""

from polydraft.options.places import folder_to_write

__all__ = ["folder_to_write"]
