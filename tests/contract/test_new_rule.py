"""CONTRIBUTING.md and the tests ask the same of a new rule: one that has what the page names passes them."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from new_rule import FirstOnly
from torch import Tensor

from polydraft.conformance import check_rule, check_tree_rule
from polydraft.verifiers import BottomUp, NodeVerifier, ScalableVerifier, TopDown

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
SECTION = PAGE.partition("## Adding a verifier")[2].partition("\n## ")[0]


def parts(protocol: type) -> set[str]:
    return {name for kind in protocol.__mro__ for name in vars(kind) if not name.startswith("_")}


def test_the_page_names_what_a_rule_must_have_and_what_lifts_it_from_the_leaves() -> None:
    needed, more = (re.findall(r"`(\w+)`", part) for part in SECTION.split("With ", 1))
    assert parts(NodeVerifier) <= {*needed}
    assert parts(ScalableVerifier) - parts(NodeVerifier) == {"shares", "marginal"} <= {*more}


def test_a_rule_with_what_the_page_names_is_a_rule_and_passes() -> None:
    rule = FirstOnly()
    assert isinstance(rule, NodeVerifier) and not isinstance(rule, ScalableVerifier)
    assert {name for name in vars(FirstOnly) if not name.startswith("_")} == parts(NodeVerifier)
    report = check_rule(rule)
    assert report.exact and report.drafts == 3 and report.misstated < 1e-9
    assert check_tree_rule(TopDown(rule)).exact


@dataclass(frozen=True)
class Lifted(FirstOnly):
    """The same with what the page says to add."""

    def shares(self, drafts: Tensor, draft_probs: Tensor, target_mass: Tensor) -> Tensor:
        return self.law(drafts, draft_probs, target_mass).child

    def marginal(self, draft_probs: Tensor, target_mass: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(draft_probs, target_mass) * (counts > 0).unsqueeze(-1)


def test_with_shares_and_marginal_it_is_lifted_from_the_leaves() -> None:
    assert isinstance(Lifted(), ScalableVerifier)
    assert check_tree_rule(BottomUp(Lifted())).exact
