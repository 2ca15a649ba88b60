"""Schemes: how the drafts of one node are drawn."""

from polydraft.schemes.conditional_poisson import ConditionalPoisson
from polydraft.schemes.coupled import Coupled
from polydraft.schemes.given import Given
from polydraft.schemes.iid import IID
from polydraft.schemes.product import Product
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
from polydraft.schemes.spec_hub import SpecHub, hub_of, require_pairs
from polydraft.schemes.top import TopK
from polydraft.schemes.top_then import TopThenIID, TopThenSample
from polydraft.schemes.without_replacement import WithoutReplacement

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
