"""Schemes: how the drafts of one node are drawn."""

from polydraft.schemes.iid import IID, ConditionalPoisson, Product
from polydraft.schemes.scheme import (
    MOST_DRAFTS,
    Draws,
    Scheme,
    SchemeOfLaw,
    SetLaw,
    Uniforms,
    check_scheme,
    enumerate_drafts,
    most_drafts_of,
    require_draft_count,
    require_drawn,
    require_independent,
    require_scheme,
    set_law_of,
)
from polydraft.schemes.top import Given, SpecHub, TopK, TopThenIID, TopThenSample, hub_of, require_pairs
from polydraft.schemes.without_replacement import Coupled, WithoutReplacement

__all__ = [
    "IID",
    "MOST_DRAFTS",
    "ConditionalPoisson",
    "Coupled",
    "Draws",
    "Given",
    "Product",
    "Scheme",
    "SchemeOfLaw",
    "SetLaw",
    "SpecHub",
    "TopK",
    "TopThenIID",
    "TopThenSample",
    "Uniforms",
    "WithoutReplacement",
    "check_scheme",
    "enumerate_drafts",
    "hub_of",
    "most_drafts_of",
    "require_draft_count",
    "require_drawn",
    "require_independent",
    "require_pairs",
    "require_scheme",
    "set_law_of",
]
