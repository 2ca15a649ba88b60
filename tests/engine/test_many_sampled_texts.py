"""Many sampled texts follow the target's law: the first half of the triples; the other half has its own file."""

import pytest
from sampled import FALSE_ALARM_RATE, PROMPT, SAMPLES, TRIPLES, Generous, exact_law, p_value, sampled_counts

from polydraft import Widths
from polydraft.trees import TreePolicy
from polydraft.verifiers import NodeVerifier

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("drafter", "rule", "policy"), TRIPLES[:8], ids=lambda one: getattr(one, "name", None))
def test_many_texts_follow_the_targets_law(drafter: str, rule: NodeVerifier, policy: TreePolicy) -> None:
    """Twenty times the samples: a bias of a per cent in one outcome would show."""
    counts, _ = sampled_counts(drafter, rule, policy, samples=20 * SAMPLES)
    assert p_value(counts, exact_law(PROMPT)) > FALSE_ALARM_RATE


def test_many_texts_would_show_a_small_bias() -> None:
    counts, _ = sampled_counts("model", Generous(extra=0.02), Widths((3, 2)), samples=30 * SAMPLES)
    assert p_value(counts, exact_law(PROMPT)) < FALSE_ALARM_RATE
