"""A rule that does not keep the target's law leaves its mark wherever its text is told of."""

import json

import pytest
import torch

import polydraft
from polydraft import GenerationOutput, Optimal, Statistics, TopDown
from polydraft.engine import summed
from polydraft.errors import InvalidParameter
from polydraft.models.tiny import tiny_draft, tiny_target
from polydraft.schemes import IID
from polydraft.verifiers import BlockVerification, BottomUp, ByShape, TreeVerifier, TypicalAcceptance

TARGET = tiny_target()
DRAFT = tiny_draft(TARGET)
PROMPT = torch.tensor([[0, 1, 1]])
OPTIONS = {"drafter": DRAFT, "temperature": 1.0, "max_new_tokens": 8, "seed": 1}


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("verifier", "name", "lossless"),
    [("typical", "typical acceptance", False), ("optimal", "optimal", True), ("block", "block verification", True)],
)
def test_every_output_names_the_rule(verifier: str, name: str, lossless: bool) -> None:
    marks = (name, lossless)
    output = polydraft.generate(TARGET, PROMPT, verifier=verifier, **OPTIONS)
    assert isinstance(output, GenerationOutput)
    assert (output.verifier, output.lossless) == (output["verifier"], output["lossless"]) == marks
    assert (output.statistics.verifier, output.statistics.lossless) == marks
    inside = TARGET.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=polydraft.generate, verifier=verifier,
        drafter=DRAFT, do_sample=True, max_new_tokens=8, return_dict_in_generate=True,
    )  # fmt: skip
    assert (inside.verifier, inside.lossless) == marks
    run = polydraft.stream(TARGET, PROMPT, verifier=verifier, **OPTIONS)
    assert (run.statistics.verifier, run.statistics.lossless) == marks  # before anything is written
    assert {(row.verifier, row.lossless) for block in run for row in block.rows.values()} == {marks}
    told = json.loads(json.dumps(run.statistics.as_dict()))
    assert (told["verifier"], told["lossless"]) == marks


def test_of_several_rules_one_that_is_lossy_makes_all_of_it_lossy() -> None:
    prompts, own = {"exact": [0, 1, 1], "lossy": [0, 1, 1]}, {"lossy": {"verifier": "typical"}}
    run = polydraft.generate_many(TARGET, prompts, per_prompt=own, verifier="optimal", **OPTIONS)
    assert (run.statistics.verifier, run.statistics.lossless) == ("optimal; typical acceptance", False)
    assert {one.name: (one.verifier, one.lossless) for one in run} == {
        "exact": ("optimal", True),
        "lossy": ("typical acceptance", False),
    }
    exact, lossy = Statistics(verifier="optimal"), Statistics(verifier="typical acceptance", lossless=False)
    for parts in ([exact, lossy, exact], [lossy, exact]):
        assert not summed(parts).lossless
    assert summed([exact, lossy, exact]).verifier == "optimal; typical acceptance"
    assert summed([exact, exact]) == exact


@pytest.mark.parametrize(
    "lossy", [TopDown(TypicalAcceptance()), ByShape(BlockVerification(), TopDown(TypicalAcceptance(IID())))]
)
def test_rules_made_of_others_are_lossy_if_one_of_these_is(lossy: TreeVerifier) -> None:
    output = polydraft.generate(TARGET, PROMPT, verifier=lossy, **OPTIONS)
    assert isinstance(output, GenerationOutput) and not output.lossless
    assert "typical acceptance" in output.verifier
    assert ByShape().lossless and BottomUp(Optimal()).lossless and TopDown(Optimal()).lossless


@pytest.mark.wrong_types
def test_a_rule_must_say_whether_it_keeps_the_law() -> None:
    class Silent:
        scheme, name = BlockVerification().scheme, "silent"
        verify = BlockVerification.verify

    with pytest.raises(InvalidParameter, match="verifier must be a rule"):
        polydraft.generate(TARGET, PROMPT, verifier=Silent(), **OPTIONS)  # pyright: ignore[reportArgumentType]
