"""Many sampled texts follow the target's law, for the second half of the triples: a file for each process."""

import pytest
from sampled import FALSE_ALARM_RATE, PROMPT, SAMPLES, TRIPLES, exact_law, p_value, sampled_counts

from polydraft.trees import TreePolicy
from polydraft.verifiers import NodeVerifier

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("drafter", "rule", "policy"), TRIPLES[8:], ids=lambda one: getattr(one, "name", None))
def test_many_texts_follow_the_targets_law(drafter: str, rule: NodeVerifier, policy: TreePolicy) -> None:
    """Twenty times the samples: a bias of a per cent in one outcome would show."""
    counts, _ = sampled_counts(drafter, rule, policy, samples=20 * SAMPLES)
    assert p_value(counts, exact_law(PROMPT)) > FALSE_ALARM_RATE
