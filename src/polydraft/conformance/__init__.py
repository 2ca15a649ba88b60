"""Proof that anyone can run: rules by enumeration, generation functions by a sequential test."""

from polydraft.conformance.check import LawReport, check
from polydraft.conformance.evidence import joint_law
from polydraft.conformance.families import Families, FamilyReport, check_family, known_families
from polydraft.conformance.node_rules import EXACT, RuleReport, check_rule, matrix
from polydraft.conformance.proved_rules import Case, cases
from polydraft.conformance.tree_rules import TreeReport, check_tree_rule, tree_matrix
from polydraft.models.tiny import tiny_draft, tiny_target

__all__ = [
    "EXACT",
    "Case",
    "Families",
    "FamilyReport",
    "LawReport",
    "RuleReport",
    "TreeReport",
    "cases",
    "check",
    "check_family",
    "check_rule",
    "check_tree_rule",
    "joint_law",
    "known_families",
    "matrix",
    "tiny_draft",
    "tiny_target",
    "tree_matrix",
]
