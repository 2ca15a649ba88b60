"""Stacks of drafters for tests: drafters that draft for drafters, and chains of several."""

from doubles import OverOneCache, perturbed
from key_views import few
from transformers import PreTrainedModel

from polydraft import (
    BlockVerification,
    ByDepthDrafter,
    Chain,
    Given,
    HuggingFaceModel,
    ModelDrafter,
    NestedDrafter,
    Recent,
    TopDown,
)
from polydraft.drafters import Drafter, NgramDrafter, RecyclingDrafter
from polydraft.verifiers import NaiveMatch


def stacks(target: PreTrainedModel) -> dict[str, Drafter]:
    """Return stacks of drafters, of which all but one draft a row alike whatever lies beside it."""
    near, far = (HuggingFaceModel(perturbed(target, scale)) for scale in (0.05, 0.1))
    rule, small = BlockVerification(), ModelDrafter(far)
    text = TopDown(NaiveMatch(Given())), Chain(3)
    return {
        "three levels": NestedDrafter(near, NestedDrafter(far, NgramDrafter(), *text, 2), rule, Chain(2), 4),
        "by depth": ByDepthDrafter((ModelDrafter(near), small, NgramDrafter()), (2, 2, 3)),
        "text first": ByDepthDrafter((NgramDrafter(), RecyclingDrafter(), small), (1, 2, 1)),
        "both": ByDepthDrafter((NestedDrafter(near, small, rule, Chain(2), 3), NgramDrafter()), (3, 4)),
        "nested behind": ByDepthDrafter((ModelDrafter(near), NestedDrafter(far, NgramDrafter(), *text)), (2, 3)),
        "over one cache": NestedDrafter(OverOneCache(model=near), small, rule, Chain(3), 4),
        "over a view": NestedDrafter(few(Recent(2, 4)), small, rule, Chain(2), 4),
        "views of views": NestedDrafter(
            few(Recent(2, 4)),
            NestedDrafter(few(Recent(1, 2)), NgramDrafter(), *text, 2),
            rule,
            Chain(2),
        ),
    }
