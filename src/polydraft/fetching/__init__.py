"""What is brought from elsewhere, once and on request: a real chat model, and Spec-Bench's questions."""

from polydraft.fetching.catalogue import FETCHABLE, Fetchable, Remote
from polydraft.fetching.fetch import fetch

__all__ = ["FETCHABLE", "Fetchable", "Remote", "fetch"]
