"""The law of stacks of drafters: one step over all draws of all loops, with every lossless rule for chains."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from choices import Choices, Chosen, OfLaw, Toy, distance, law_of
from doubles import OverOneCache
from key_views import few
from torch import Tensor

from polydraft.catalogue import tables
from polydraft.drafters import (
    ByDepthDrafter,
    Drafter,
    DraftRequest,
    ModelDrafter,
    NestedDrafter,
    NgramDrafter,
    Recent,
    TextDrafter,
)
from polydraft.drafters.several.by_depth import ByDepthState
from polydraft.drafters.several.nested import NestedState
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.trees import Chain, Draft, TokenTree, extended
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NodeVerifier,
    PathVerifier,
    ScalableVerifier,
    SpeculativeSampling,
    TopDown,
)
from polydraft.verifiers.trees.lifts import PathLaw

TEXT, NEW = [1, 0, 1, 1, 0, 1], 3
MODELS = [Toy(2, seed=seed) for seed in range(4)]
TARGET, MIDDLE, SMALL, TINY = MODELS
Stack = Callable[[PathVerifier], Drafter]


def chain_rules() -> dict[str, PathVerifier]:
    """Return every lossless rule whose law is known, for each scheme of which a lone draft is a draw from its row."""
    found = dict[str, PathVerifier]()
    for line in (one for one in tables.RULES if one.lossless):
        for scheme in (one for one in line.known if one.lone_draft_is_drawn and not one.several_rows):
            rule = line.of(scheme)
            name = f"{line.word} {scheme.name}"
            if isinstance(rule, PathVerifier):
                found[name] = rule
            if isinstance(rule, NodeVerifier):
                found[name] = TopDown(rule)
            if isinstance(rule, ScalableVerifier):
                found[f"{name}, bottom up"] = BottomUp(rule)
    return found


RULES = chain_rules()


ONE = Chain(1)
STACKS: dict[str, Stack] = {
    "two levels": lambda rule: NestedDrafter(MIDDLE, ModelDrafter(SMALL), rule, ONE, 2),
    "two levels over a view": lambda rule: NestedDrafter(few(Recent(1, 2)), ModelDrafter(SMALL), rule, ONE, 2),
    "two levels in one cache": lambda rule: NestedDrafter(OverOneCache(SMALL), ModelDrafter(TINY), rule, ONE, 2),
    "three levels": lambda rule: NestedDrafter(
        MIDDLE, NestedDrafter(SMALL, ModelDrafter(TINY), rule, ONE, 1), rule, ONE, 1
    ),
    "three levels over views": lambda rule: NestedDrafter(
        few(Recent(1, 3)),
        NestedDrafter(few(Recent(1, 1)), ModelDrafter(SMALL), rule, ONE, 1),
        rule,
        ONE,
        1,
    ),
    "three levels in one cache": lambda rule: NestedDrafter(
        OverOneCache(MIDDLE), NestedDrafter(OverOneCache(SMALL), ModelDrafter(TINY), rule, ONE, 1), rule, ONE, 1
    ),
    "by depth": lambda rule: ByDepthDrafter((ModelDrafter(MIDDLE), ModelDrafter(SMALL)), (1, 1)),
    "by depth, text behind": lambda rule: ByDepthDrafter((ModelDrafter(MIDDLE), NgramDrafter()), (1, 1)),
    "by depth, text before": lambda rule: ByDepthDrafter((NgramDrafter(), ModelDrafter(MIDDLE)), (1, 1)),
    "by depth behind a view": lambda rule: ByDepthDrafter((few(Recent(1, 2)), ModelDrafter(SMALL)), (1, 1)),
    "two levels, then a third drafter": lambda rule: ByDepthDrafter(
        (NestedDrafter(MIDDLE, ModelDrafter(SMALL), rule, ONE, 1), ModelDrafter(TINY)), (1, 1)
    ),
    "by depth inside": lambda rule: NestedDrafter(
        MIDDLE, ByDepthDrafter((ModelDrafter(SMALL), NgramDrafter()), (1, 1)), rule, Chain(2), 1
    ),
}
FEW = {"block iid", "speculative iid"}


def found_law(stack: Stack, rule: PathVerifier, **options: Any) -> tuple[float, set[str]]:
    """Return how far the law of three tokens is from the target's, and why drafters failed."""
    made: Callable[[Choices], Drafter] = lambda choices: stack(Chosen(rule, choices))  # type: ignore[arg-type]  # noqa: E731
    depth = stack(rule).defaults(SamplingParams()).policy  # type: ignore[union-attr]
    given: dict[str, Any] = {"prompts": [TEXT], "steps": 1, **options}
    law, failures = law_of(TARGET, made, rule, depth, new=NEW, **given)
    return distance(law, TARGET.texts(TEXT, NEW)), failures


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("rule", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in RULES])
def test_over_all_draws_of_all_loops_the_law_is_the_targets(stack: str, rule: str) -> None:
    off, failures = found_law(STACKS[stack], RULES[rule])
    assert off < 1e-12 and not failures


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["two levels over a view", "by depth", "by depth, text behind"])
def test_a_second_step_goes_on_from_what_was_kept(stack: str) -> None:
    off, failures = found_law(STACKS[stack], BlockVerification(), steps=2)
    assert off < 1e-12 and not failures


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["by depth", "by depth, text before"])
def test_a_neighbour_with_another_text_leaves_a_rows_law_alone(stack: str) -> None:
    off, failures = found_law(STACKS[stack], BlockVerification(), prompts=[TEXT, [0, 0, 1, 0, 0, 1]])
    assert off < 1e-12 and not failures


# --- What the cases above would find ----------------------------------------------------------------------------------


class WholeRow(PathLaw):
    """Draws the token behind a rejection from the law itself, as TriForce's published loop does inside."""

    def next_token(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return target_probs


def without_last(draft: Draft, drop: Tensor) -> Draft:
    """Return chains whose last node is gone in some rows."""
    last = draft.tree.valid.sum(dim=-1) - 1
    valid = draft.tree.valid.clone()
    valid[torch.arange(len(last)), last] = ~(drop & (last > 0))
    return replace(draft, tree=TokenTree(draft.tree.tokens, draft.tree.topology, valid))


def chances(draft: Draft) -> Tensor:
    """Return the draft probability of each row's last node."""
    last = draft.tree.valid.sum(dim=-1) - 1
    rows = torch.arange(len(last))
    atoms = draft.atoms[rows, last].clamp_min(0)
    return draft.probs[rows, (last - 1).clamp_min(0), atoms]


class DropsUnlikely(NestedDrafter):
    """Looks at the last token that the loop drew, and drops it if it is unlikely."""

    def draft(self, state: NestedState, request: DraftRequest) -> tuple[Draft, NestedState]:
        draft, after = super().draft(state, request)
        return without_last(draft, chances(draft) < 0.5), after


class DropsAbove(ByDepthDrafter):
    """Lets the cheaper drafter judge the token above it, which was drawn: it is drafted anew where it is unlikely."""

    def draft(self, state: ByDepthState, request: DraftRequest) -> tuple[Draft, ByDepthState]:
        chain, members = self._stretch(0, state, request, 1)
        kept = without_last(chain, chances(chain) < 0.5)
        behind, own = self._behind(1, state, request, kept, 1)
        return extended(kept, behind), replace(state, members=(members, own))


@pytest.mark.parametrize("rule", [BlockVerification(), TopDown(SpeculativeSampling())], ids=["block", "token by token"])
def test_the_middles_law_in_the_place_of_its_residual_is_caught(rule: PathVerifier) -> None:
    stack = lambda choices: NestedDrafter(  # noqa: E731
        MIDDLE, ModelDrafter(SMALL), Chosen(OfLaw(rule, WholeRow), choices), ONE, 2
    )
    law, _ = law_of(TARGET, stack, rule, Chain(2), [TEXT], NEW, steps=1)
    assert distance(law, TARGET.texts(TEXT, NEW)) > 0.002


@pytest.mark.parametrize("rule", [BlockVerification(), TopDown(SpeculativeSampling())], ids=["block", "token by token"])
def test_drawn_tokens_that_are_dropped_by_what_they_are_are_caught(rule: PathVerifier) -> None:
    off, _ = found_law(lambda inside: DropsUnlikely(MIDDLE, ModelDrafter(SMALL), inside, ONE, 2), rule)
    assert off > 0.002
    off, _ = found_law(lambda inside: DropsAbove((ModelDrafter(MIDDLE), ModelDrafter(SMALL)), (1, 1)), rule)
    assert off > 0.002


# --- Errors that follow from drawn tokens -----------------------------------------------------------------------------


class FailsBehindOne(ModelDrafter):
    """Fails where the text that it is to go on from ends in token 1: before it draws, or behind that."""

    behind = False

    def draft(self, state: Any, request: DraftRequest) -> Any:
        ends = int(request.text.last()[0]) == 1
        if ends and not self.behind:
            raise OSError("no more")
        found = super().draft(state, request)
        if ends:
            raise OSError("no more")
        return found


class FailsToGuess(TextDrafter):
    """Fails before it guesses anything."""

    name = "fails"

    def guesses(self, state: Any, text: Text, bounds: Any) -> Any:
        raise OSError("no more")


class Behind(FailsBehindOne):
    behind = True


@pytest.mark.parametrize(
    "member", [FailsBehindOne(SMALL), Behind(SMALL), FailsToGuess()], ids=lambda one: type(one).__name__
)
def test_a_later_member_that_fails_leaves_the_chain_above_it(member: Drafter) -> None:
    """What it drew by then is verified too; the error may follow from what the first member drew."""
    off, failures = found_law(
        partial(lambda rule: ByDepthDrafter((ModelDrafter(MIDDLE), member), (1, 1))), BlockVerification()
    )
    assert off < 1e-12 and failures
