"""Draft models made of the target itself: with weights of eight bits, or without some of its layers."""

from polydraft.models.derived.copying import without_layers
from polydraft.models.derived.int8 import Int8Linear, in_int8, int8_product
from polydraft.models.derived.spelling import check_word, derived

__all__ = ["Int8Linear", "check_word", "derived", "in_int8", "int8_product", "without_layers"]
