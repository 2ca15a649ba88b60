"""CONTRIBUTING.md and the tests ask the same of a new rule: one that has what the page names passes them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from new_rule import FirstOnly
from torch import Tensor

import polydraft
import polydraft.verifiers.checks as checks_module
from polydraft.conformance import check_rule, check_tree_rule
from polydraft.errors import InvalidProbabilities
from polydraft.verifiers import BottomUp, NodeVerifier, OutcomeLaw, ScalableVerifier, TopDown, Traits, traits
from polydraft.verifiers.checks import is_foreign

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


def spoilt(law: OutcomeLaw, drafts: Tensor, how: str) -> OutcomeLaw:
    """Return a law that is wrong in one way."""
    child, rest = law.child.clone(), law.rest.clone()
    if how == "negative":
        rest[..., 0] -= 0.5
        rest[..., 1] += 0.5
    if how == "absent":
        child += 0.25 * (drafts < 0)
        rest *= (1 - child.sum(-1, keepdim=True)) / rest.sum(-1, keepdim=True).clamp_min(1e-9)
    if how == "shape":
        rest = rest[..., :-1]
    return OutcomeLaw(child, rest * {"short": 0.9, "long": 1.25, "nan": torch.nan}.get(how, 1.0))


@dataclass(frozen=True)
class Wrong(FirstOnly):
    """The same with a mistake."""

    how: str = ""
    name = "wrong"

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        if self.how == "none":
            return None  # pyright: ignore[reportReturnType]
        return spoilt(super().law(drafts, draft_probs, target_probs), drafts, self.how)


SAYS = {
    "none": "its law is no OutcomeLaw, but None",
    "short": r"sum to 0\.9\d*, not to 1",
    "long": r"sum to 1\.\d+, not to 1",
    "nan": "a probability is NaN or infinite",
    "negative": r"a probability is negative, -0\.\d+",
    "absent": "a draft that is absent, -1, is accepted",
    "shape": r"its law\.rest is of shape \[1, 24\], not \[1, 25\]",
}
IDS = torch.tensor([[1, 2, 3]])


def written(verifier: object) -> Any:
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "top_k": 5, "seed": 2, "policy": "2,1"}
    mask, draft = torch.ones_like(IDS), tiny_model("llama", seed=1)
    return polydraft.generate(
        tiny_model("llama"), IDS, attention_mask=mask, drafter=draft, verifier=verifier, **options
    )


@pytest.mark.parametrize("how", SAYS)
def test_a_rule_from_outside_that_gives_no_law_ends_the_text(how: str) -> None:
    with pytest.raises(InvalidProbabilities, match=f"The rule 'wrong' gives no law: .*{SAYS[how]}") as caught:
        written(Wrong(how=how))
    assert str(caught.value).count(". ") == 0
    if how not in (
        "none",
        "shape",
        "absent",
    ):  # a shape is no law to be judged, and independent drafts are never absent
        assert check_rule(Wrong(how=how), 1).failed


def test_a_rule_from_outside_that_gives_laws_writes_what_it_would_write_unchecked() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks_module, "is_foreign", lambda rule: False)
        unchecked = written(FirstOnly()).sequences
    assert is_foreign(FirstOnly()) and not is_foreign(polydraft.RecursiveRejection())
    assert written(FirstOnly()).sequences.tolist() == unchecked.tolist()


@dataclass(frozen=True)
class Greedy(Lifted):
    """Shares that are too large, or a marginal that is."""

    part: str = "shares"
    name = "greedy"

    def shares(self, drafts: Tensor, draft_probs: Tensor, target_mass: Tensor) -> Tensor:
        return super().shares(drafts, draft_probs, target_mass) + (drafts >= 0) * (self.part == "shares")

    def marginal(self, draft_probs: Tensor, target_mass: Tensor, counts: Tensor) -> Tensor:
        return super().marginal(draft_probs, target_mass, counts) + 0.5 * (self.part == "marginal")


@pytest.mark.parametrize(
    ("part", "says"), [("shares", "sum to more than 1"), ("marginal", "more than its target mass")]
)
def test_shares_and_marginals_from_outside_are_checked_too(part: str, says: str) -> None:
    with pytest.raises(InvalidProbabilities, match=f"The rule 'greedy' gives no law: .*{says}"):
        written(BottomUp(Greedy(part=part)))
    assert written(BottomUp(Lifted())).sequences.shape[1] > 3


def test_a_rule_that_says_nothing_more_of_itself_has_the_usual_traits() -> None:
    assert traits(FirstOnly()) == Traits(best_alone=False, most_drafts=4095, node_rule=None)
    assert traits(TopDown(FirstOnly())) == Traits(best_alone=False, most_drafts=4095, node_rule=FirstOnly())
    assert traits(polydraft.SpeculativeSampling()) == Traits(best_alone=True, most_drafts=1, node_rule=None)
    assert traits(polydraft.TopDown(polydraft.SpecHubRule())).most_drafts == 2
