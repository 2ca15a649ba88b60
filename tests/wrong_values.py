"""Every public constructor and function of some rooms, called with wrong values: a result or a sentence, nothing else.

Run as a program, without the type checker that pytest puts around the package, which would refuse most of these values
before the package sees them. It prints what went wrong, and how many calls there were.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from choices import Toy

from polydraft import schemes, theory, trees, verifiers
from polydraft.catalogue import parse_policy
from polydraft.conformance import check_rule, check_tree_rule
from polydraft.drafters import LookaheadDrafter, NgramDrafter, NgramPool, OuroborosDrafter
from polydraft.errors import PolydraftError
from polydraft.probs import SamplingParams
from polydraft.trees.growing import Drawn

SCHEME = schemes.IID()
ROW = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
NAN, INF = float("nan"), float("inf")
NUMBERS = [
    *("", "x", "4,2", b"1", None, object(), [], (), {}, [1], (1,), int, len, 1j, True, False),
    *(
        NAN,
        INF,
        -INF,
        -1,
        0,
        1,
        2,
        3,
        -0.5,
        0.0,
        0.5,
        1.0,
        1.5,
        2.0,
        1e308,
        5e-324,
        10**6,
        2**31,
        2**63,
        10**30,
        10**400,
    ),
    *(torch.tensor(1), torch.tensor([0.5, 0.5]), SCHEME, Drawn),
]
LISTS = [
    *NUMBERS,
    (1.5,),
    ("1",),
    (None,),
    (-1,),
    (0,),
    (True,),
    (NAN,),
    (2**63,),
    (10**30,),
    (1, 2, 3),
    [2, 1],
    (1,) * 5000,
]
LISTS += [(9,) * 9, "abcd", {"a": 1}, (1.0, 2.0, 3.0, 4.0), (1.0, NAN, 0.0, INF)]
NESTED = [
    *LISTS,
    ((1.5,),),
    (("1",),),
    ((-1,),),
    ((2,), (1, 1, 1)),
    ((1,), 1),
    ([1],),
    ((True,),),
    ((2**63,),),
    ((),),
    (((0.5,),),),
]
OBJECTS = [
    *NUMBERS,
    schemes.IID,
    verifiers.NaiveMatch,
    verifiers.NaiveMatch(),
    verifiers.BlockVerification(),
    NgramDrafter(),
]
CONFIDENCE = (0.5, 0.5, 0.0, 0.0)


@dataclass
class Case:
    """A callable, good arguments, and wrong values for each."""

    call: Callable[..., Any]
    good: dict[str, Any]
    wrong: dict[str, list[Any]] = field(default_factory=dict)

    def calls(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for name, values in self.wrong.items():
            for value in values:
                says = f"{self.call} with {name}={str(value)[:60]} ({type(value).__name__})"
                yield says, value, {**self.good, name: value}


def numbers(call: Callable[..., Any], good: dict[str, Any], *names: str) -> Case:
    return Case(call, good, dict.fromkeys(names, NUMBERS))


def used(policy: trees.TreePolicy) -> int:
    """Do with a policy what an engine does first: a mistake that shows only now is raised too late."""
    return policy.shape.size + policy.shape.max_children


def policies() -> list[Case]:
    return [
        numbers(trees.Chain, {}, "length"),
        Case(trees.Widths, {}, {"widths": LISTS}),
        Case(trees.TrunkThenBranch, {"trunk": 1, "widths": (2,)}, {"trunk": NUMBERS, "widths": LISTS}),
        Case(trees.Fixed, {}, {"shape": NESTED}),
        numbers(trees.BestFirst, {"drafts": 4}, "drafts", "depth", "children", "beam"),
        Case(
            trees.BestFirst, {"drafts": 4095, "depth": 4095, "children": 4095, "beam": 4095}, {"drafts": [4095, 4094]}
        ),
        numbers(trees.ExpectedAcceptance, {"drafts": 4}, "drafts", "depth", "children", "beam", "least", "later"),
        numbers(trees.Eagle2, {}, "width", "depth", "drafts"),
        Case(trees.Eagle2, {"width": 4095, "depth": 4095, "drafts": 4095}, {"drafts": [4095, 4094]}),
        Case(trees.Merged, {"widths": (1,)}, {"widths": LISTS, "members": NUMBERS}),
        Case(trees.Confident, {"widths": (1,)}, {"widths": LISTS, "threshold": NUMBERS, "confidence": OBJECTS}),
        numbers(trees.AdaptiveThreshold, {}, "length", "threshold", "goal", "step", "forgetting", "smoothing"),
        Case(parse_policy, {}, {"text": OBJECTS}),
    ]


def drafters() -> list[Case]:
    inside = ("level", "window", "guesses", "most_scored")
    model = {"draft_model": Toy()}
    return [
        numbers(LookaheadDrafter, {}, *inside),
        Case(LookaheadDrafter, {}, {"pool": OBJECTS}),
        numbers(OuroborosDrafter, model, "drafts", "phrases", *inside),
        Case(OuroborosDrafter, model, {"draft_model": OBJECTS, "pool": OBJECTS}),
        numbers(NgramPool, {"level": 2, "most": 1}, "level", "most"),
    ]


def tree_functions() -> list[Case]:
    shape = trees.TreeShape(((1,),))
    search = {"acceptance": (0.5, 0.2), "nodes": 4, "depth": 2}
    seconds = {"verify_seconds": lambda n: 1.0, "draft_seconds": lambda n: 0.1}
    rows = {"features": torch.rand(6, 4), "accepted": torch.tensor([True, False] * 3)}
    return [
        Case(trees.TreeShape, {}, {"counts": NESTED}),
        numbers(trees.EntropyBound, {}, "scale"),
        Case(trees.Classifier, {"weights": CONFIDENCE}, {"weights": LISTS, "bias": NUMBERS}),
        numbers(trees.fit_classifier, rows, "penalty", "rounds"),
        Case(trees.Acceptance, {}, {"rates": NESTED}),
        Case(trees.Acceptance.positional, {}, {"ranks": LISTS}),
        numbers(trees.best_shape, search, "nodes", "depth"),
        numbers(
            trees.fastest_shape,
            {"acceptance": (0.5,), **seconds, "max_nodes": 3, "max_depth": 2},
            *("max_nodes", "max_depth", "overhead"),
        ),
        numbers(trees.step_seconds, {"shape": shape, **seconds}, "overhead"),
    ]


def theory_functions() -> list[Case]:
    pair = {"draft_probs": ROW, "target_probs": ROW}
    node = {"scheme": SCHEME, "draft_probs": ROW, "target_mass": ROW, "k": 2}
    speed = {"acceptance": 0.5, "length": 2, "cost": 0.1}
    counts = {"draft_probs": ROW, "counts": torch.tensor(2)}
    return [
        Case(theory.optimal_acceptance, {**pair, "scheme": SCHEME, "k": 2}, {"k": NUMBERS, "scheme": OBJECTS}),
        *(
            Case(call, node, {"k": NUMBERS, "scheme": OBJECTS})
            for call in (theory.lp_acceptance, theory.flow_acceptance)
        ),
        numbers(theory.lp_acceptance, node, "max_iterations"),
        Case(theory.drafted_sets, {"scheme": SCHEME, "draft_probs": ROW, "k": 2}, {"k": NUMBERS, "scheme": OBJECTS}),
        Case(schemes.enumerate_drafts, {"scheme": SCHEME, "draft_probs": ROW, "k": 2}, {"k": NUMBERS}),
        numbers(theory.top_then_sample_acceptance, {**pair, "k": 2}, "k"),
        numbers(theory.two_drafts_suffice, pair, "tolerance"),
        Case(theory.inclusion, {"scheme": SCHEME, **counts}, {"scheme": OBJECTS}),
        numbers(theory.time_nodes, {"rates": ROW, "counts": torch.tensor(3), "most": 3}, "most", "density"),
        numbers(
            theory.minimising_order,
            {"scheme": SCHEME, "draft_probs": ROW, "target_mass": ROW, "counts": torch.tensor(2)},
            "rounds",
        ),
        numbers(theory.lenient_acceptance, {**pair, "lenience": 0.5}, "lenience"),
        numbers(theory.tokens_per_call, {"acceptance": 0.5, "length": 2}, "acceptance", "length"),
        *(
            numbers(call, speed, "acceptance", "length", "cost")
            for call in (theory.time_factor, theory.operations_factor)
        ),
        *(
            numbers(call, {"acceptance": 0.5, "cost": 0.1}, "acceptance", "cost")
            for call in (theory.can_gain, theory.least_gain)
        ),
        numbers(theory.best_length, {"acceptance": 0.5, "cost": 0.1}, "acceptance", "cost", "longest"),
        *(
            Case(
                call,
                {"branching": ROW},
                {"parents": [(-1, one, 0) for one in NUMBERS] + [(one, 0, 1) for one in NUMBERS]},
            )
            for call in (theory.expected_accepted_length, theory.block_efficiency)
        ),
    ]


def rules() -> list[Case]:
    takes_scheme = (*verifiers.__dict__.values(),)
    kinds = [
        one for one in takes_scheme if isinstance(one, type) and "scheme" in getattr(one, "__dataclass_fields__", {})
    ]
    assert len(kinds) > 12
    return [
        numbers(schemes.TopThenIID, {}, "top"),
        *(Case(kind, {}, {"scheme": OBJECTS}) for kind in kinds),
        numbers(verifiers.ImportanceWeighted, {}, "free", "alphabet"),
        numbers(verifiers.TypicalAcceptance, {}, "epsilon", "delta"),
        numbers(verifiers.TopBeta, {}, "beta", "tau"),
        numbers(verifiers.Lenient, {}, "lenience"),
        numbers(verifiers.Rollback, {}, "threshold"),
        *(
            Case(lift, {}, {"rule": [*OBJECTS, verifiers.Lenient()]})
            for lift in (verifiers.TopDown, verifiers.BottomUp)
        ),
        Case(verifiers.ByShape, {}, {"chain": OBJECTS, "tree": OBJECTS}),
        numbers(SamplingParams, {}, "temperature", "top_k", "top_p", "min_p", "typical_p"),
        Case(check_rule, {"rule": verifiers.NaiveMatch(), "k": 1}, {"k": NUMBERS}),
        Case(
            check_tree_rule,
            {"rule": verifiers.TopDown(verifiers.NaiveMatch())},
            {"widths": ["x", (1,), (1.5, 1), (9, 9), 3]},
        ),
    ]


def examined() -> tuple[int, list[str]]:
    """Make all calls; return their number and what came of them that should not."""
    number, wrong = 0, list[str]()
    for case in [*policies(), *drafters(), *tree_functions(), *theory_functions(), *rules()]:
        for said, value, arguments in case.calls():
            number += 1
            try:
                found = case.call(**arguments)
            except PolydraftError as error:
                if "\n" in str(error) or not str(error).endswith(".") or len(str(error)) > 700:
                    wrong.append(f"{said}: no sentence: {error}")
                continue
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{said}: {type(error).__name__}: {error}")
                continue
            try:
                senseless = isinstance(value, bool) or (isinstance(value, float) and value != value)
                wrong += [f"{said}: accepted {found}"] if senseless or unlikely(found) else []
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{said}: too late: {type(error).__name__}: {error}")
    return number, wrong


def unlikely(found: Any) -> bool:
    """Use what was built; tell whether it should not have been."""
    if isinstance(found, trees.TreePolicy) and not isinstance(found, torch.Tensor):
        return not 1 <= used(found) <= 2 * 4096
    if isinstance(found, trees.TreeShape):
        return not 1 <= found.size <= 4096
    if isinstance(found, schemes.TopThenIID):
        drafts = found.sample(ROW, torch.tensor(2), torch.rand(3, dtype=torch.float64), 2)
        return theory.optimal_acceptance(ROW, ROW, found, 2).isnan().item() or drafts.shape != (2,)
    return False


if __name__ == "__main__":
    warnings.simplefilter("error")
    made, mistakes = examined()
    sys.stdout.write("\n".join([f"{made} calls", *mistakes]))
    sys.exit(bool(mistakes))
