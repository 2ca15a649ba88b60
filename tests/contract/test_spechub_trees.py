"""SpecHub has two drafts per node: a tree with more is refused before anything is scored."""

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import nn

import polydraft
from polydraft.drafters import ModelDrafter, NoDraft
from polydraft.engine import generate_many
from polydraft.errors import UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.models.anatomy import WATCHING
from polydraft.schemes import SpecHub, TopThenSample, require_pairs
from polydraft.trees import Chain, Fixed, TreePolicy, TreeShape, Widths
from polydraft.verifiers import BottomUp, NaiveMatch, Optimal, Race, SpecHubRule, TopDown, TreeVerifier

RULES: list[TreeVerifier] = [
    TopDown(SpecHubRule()),
    BottomUp(SpecHubRule()),
    TopDown(Optimal(SpecHub())),
    TopDown(Race(SpecHub())),
    TopDown(NaiveMatch(SpecHub())),
]
WIDE: list[tuple[TreePolicy, int]] = [(Widths((3,)), 3), (Fixed(TreeShape(((1,), (2,), (2, 4)))), 4)]
IDS = torch.tensor([[3, 1, 4, 1, 5]])
OPTIONS = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "temperature": 0.9, "top_k": 0, "seed": 1}
each_rule = pytest.mark.parametrize("verifier", RULES, ids=lambda rule: f"{type(rule).__name__}, {rule.name}")


def untouched() -> nn.Module:
    """Return a model that was tried and must not be run any more."""
    model = tiny_model("llama")
    HuggingFaceModel(model)

    def fail(*_: object) -> None:
        raise AssertionError("The model was run.")

    setattr(fail, WATCHING, True)  # else the model would be tried anew
    model.register_forward_pre_hook(fail)
    return model


@each_rule
@pytest.mark.parametrize(("policy", "widest"), WIDE)
def test_a_tree_with_more_than_two_children_is_refused_before_generation(
    verifier: TreeVerifier, policy: TreePolicy, widest: int
):
    says = f'SpecHub draws at most 2 drafts per node, but the tree has a node with {widest}; use a tree with .* "2,2"'
    target, drafter = untouched(), ModelDrafter(HuggingFaceModel(untouched()))
    chosen = {"drafter": drafter, "verifier": verifier, "policy": policy}
    with pytest.raises(UnpairedScheme, match=says):
        polydraft.stream(target, IDS, **chosen, **OPTIONS)
    with pytest.raises(UnpairedScheme, match=says):
        polydraft.generate(target, IDS, **chosen, **OPTIONS)
    with pytest.raises(UnpairedScheme, match=says):
        generate_many(target, [IDS[0]], **chosen, max_new_tokens=6, temperature=0.9, top_k=0)


@pytest.mark.parametrize("verifier", RULES[:2], ids=["top down", "bottom up"])
def test_pairs_and_chains_are_drawn(verifier: TreeVerifier):
    target = tiny_model("llama")
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.02)))
    for policy in (Widths((2, 2)), Chain(3)):
        found = polydraft.generate(target, IDS, drafter=drafter, verifier=verifier, policy=policy, **OPTIONS)
        assert found.sequences.shape == (1, 11)
        assert found.statistics.drafted > 0
        assert found.statistics.fallback == ""


def test_without_drafts_the_shape_does_not_matter():
    target = tiny_model("llama")
    choices = {"drafter": NoDraft(), "verifier": TopDown(SpecHubRule())}
    found = polydraft.generate(target, IDS, **choices, policy=Widths((4,)), **OPTIONS)
    assert found.sequences.shape == (1, 11)


def test_other_schemes_draw_any_number():
    require_pairs(SpecHub(), 2)
    require_pairs(TopThenSample(), 9)
