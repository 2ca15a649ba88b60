"""Verification rules: which draft to keep, so that the output keeps the target's law."""

from polydraft.verifiers.law import NodeVerifier, OutcomeLaw, ScalableVerifier, TreeVerifier
from polydraft.verifiers.nodes.naive import NaiveMatch
from polydraft.verifiers.nodes.recursive_iid import RecursiveRejection
from polydraft.verifiers.nodes.recursive_without_replacement import RecursiveRejectionWithoutReplacement
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.trees.top_down import TopDown

__all__ = [
    "NaiveMatch",
    "NodeVerifier",
    "OutcomeLaw",
    "RecursiveRejection",
    "RecursiveRejectionWithoutReplacement",
    "ScalableVerifier",
    "SpeculativeSampling",
    "TopDown",
    "TopThenSampleRule",
    "TreeVerifier",
]
