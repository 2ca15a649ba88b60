"""What is brought from elsewhere, once and on request: a real chat model, and Spec-Bench's questions."""

from polydraft.fetching.attempt import fetch
from polydraft.fetching.catalogue import FETCHABLE, Fetchable

__all__ = ["FETCHABLE", "Fetchable", "fetch"]
