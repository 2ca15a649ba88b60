"""Models whose text cannot branch: recurrent and convolutional layers, and positions that cannot be given."""

from polydraft.models.chains.counting import scored_by_count, without
from polydraft.models.chains.listed import listed_cache
from polydraft.models.chains.remembering import RememberingCache, remembers
from polydraft.models.chains.states import States

__all__ = ["RememberingCache", "States", "listed_cache", "remembers", "scored_by_count", "without"]
