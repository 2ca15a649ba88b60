"""Sampled text follows the target's law: chi-square on the joint law of the first tokens, against enumeration."""

import pytest
import torch
from sampled import (
    FALSE_ALARM_RATE,
    PROMPT,
    SAMPLES,
    TRIPLES,
    VOCAB,
    Generous,
    drafter_named,
    exact_law,
    p_value,
    sampled_counts,
    target,
)

import polydraft
from polydraft import Given, NaiveMatch, RecursiveRejection, RecursiveRejectionWithoutReplacement, Widths
from polydraft.trees import TreePolicy
from polydraft.verifiers import NodeVerifier


@pytest.mark.long(2)
@pytest.mark.parametrize(("drafter", "rule", "policy"), TRIPLES[::2], ids=lambda one: getattr(one, "name", None))
def test_texts_follow_the_targets_law(drafter: str, rule: NodeVerifier, policy: TreePolicy) -> None:
    counts, statistics = sampled_counts(drafter, rule, policy)
    assert p_value(counts, exact_law(PROMPT)) > FALSE_ALARM_RATE
    if drafter != "none":
        assert 0.05 < statistics.acceptance_rate < 0.99


WITHOUT_REPLACEMENT = RecursiveRejectionWithoutReplacement()


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("drafter", "rule", "options", "samples"),
    [
        ("model", WITHOUT_REPLACEMENT, {"temperature": 0.6}, SAMPLES),
        pytest.param("model", WITHOUT_REPLACEMENT, {"temperature": 1.5, "top_p": 0.8}, SAMPLES, marks=pytest.mark.slow),
        pytest.param("model", WITHOUT_REPLACEMENT, {"top_k": 3}, SAMPLES, marks=pytest.mark.slow),
        pytest.param("model", WITHOUT_REPLACEMENT, {"temperature": 1.2, "min_p": 0.3}, SAMPLES, marks=pytest.mark.slow),
        ("model", WITHOUT_REPLACEMENT, {"typical_p": 0.7}, SAMPLES),
        ("model", WITHOUT_REPLACEMENT, {"repetition_penalty": 1.8}, 600),
        ("model", RecursiveRejection(), {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.3}, 600),
        pytest.param("n-gram", NaiveMatch(Given()), {"top_p": 0.7}, SAMPLES, marks=pytest.mark.slow),
        ("n-gram", NaiveMatch(Given()), {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.8}, 600),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, dict) else getattr(one, "name", None),
)
def test_sampling_options_change_the_law_as_hugging_face_does(
    drafter: str, rule: NodeVerifier, options: dict[str, float], samples: int
) -> None:
    counts, _ = sampled_counts(drafter, rule, Widths((3, 2)), samples, **options)
    assert p_value(counts, exact_law(PROMPT, **options)) > FALSE_ALARM_RATE
    assert p_value(counts, exact_law(PROMPT)) < FALSE_ALARM_RATE


def test_the_test_would_notice_a_biased_rule() -> None:
    policy, law = Widths((3, 2)), exact_law(PROMPT)
    biased, _ = sampled_counts("model", Generous(), policy)
    honest, _ = sampled_counts("model", Generous(extra=0.0), policy)
    assert p_value(biased, law) < FALSE_ALARM_RATE
    assert p_value(honest, law) > FALSE_ALARM_RATE


def test_the_test_would_notice_a_law_of_another_text() -> None:
    counts, _ = sampled_counts("model", RecursiveRejection(), Widths((3, 2)))
    assert p_value(counts, exact_law([*PROMPT[:-1], 4])) < FALSE_ALARM_RATE


def test_rows_are_independent_of_each_other() -> None:
    output = polydraft.generate(
        target(),
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        drafter=drafter_named("model"),
        seed=3,
        temperature=1.0,
        top_k=0,
        max_new_tokens=1,
        num_return_sequences=SAMPLES,
    )
    first = output.sequences[:, -1]
    pairs = (VOCAB * first[0::2] + first[1::2]).bincount(minlength=VOCAB**2)
    one = exact_law(PROMPT).view(VOCAB, -1).sum(dim=-1)
    assert p_value(pairs, torch.outer(one, one).flatten()) > FALSE_ALARM_RATE
