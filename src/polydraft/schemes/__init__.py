"""Schemes: how the drafts of one node are drawn."""

from polydraft.schemes.given import Given
from polydraft.schemes.iid import IID
from polydraft.schemes.scheme import Scheme, enumerate_drafts, require_scheme
from polydraft.schemes.top import TopK
from polydraft.schemes.top_then_sample import TopThenSample
from polydraft.schemes.without_replacement import WithoutReplacement

__all__ = [
    "IID",
    "Given",
    "Scheme",
    "TopK",
    "TopThenSample",
    "WithoutReplacement",
    "enumerate_drafts",
    "require_scheme",
]
