"""Verification rules: which draft to keep, so that the output keeps the target's law."""

from polydraft.verifiers.law import NodeVerifier, OutcomeLaw, TreeVerifier
from polydraft.verifiers.naive import NaiveMatch
from polydraft.verifiers.recursive_iid import RecursiveRejection
from polydraft.verifiers.recursive_without_replacement import RecursiveRejectionWithoutReplacement
from polydraft.verifiers.speculative import SpeculativeSampling
from polydraft.verifiers.top_down import TopDown
from polydraft.verifiers.top_then_sample import TopThenSampleRule

__all__ = [
    "NaiveMatch",
    "NodeVerifier",
    "OutcomeLaw",
    "RecursiveRejection",
    "RecursiveRejectionWithoutReplacement",
    "SpeculativeSampling",
    "TopDown",
    "TopThenSampleRule",
    "TreeVerifier",
]
