"""Models whose text cannot branch: recurrent and convolutional layers, and positions that cannot be given."""

from polydraft.models.chains.counting import scored_by_count, without
from polydraft.models.chains.handed import NAME as HANDED
from polydraft.models.chains.handed import HandedCache, listed_cache, row_by_row
from polydraft.models.chains.remembering import RememberingCache, States, remembers

__all__ = [
    "HANDED",
    "HandedCache",
    "RememberingCache",
    "States",
    "listed_cache",
    "remembers",
    "row_by_row",
    "scored_by_count",
    "without",
]
