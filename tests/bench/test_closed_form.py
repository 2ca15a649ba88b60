"""What bounds a speed-up: the classic formula where its assumptions hold, and each cost where they do not."""

import pytest

from polydraft.bench.speed.speed_ups import bound_of
from polydraft.engine import Statistics
from polydraft.theory import time_factor, tokens_per_call

PLAIN = Statistics(
    new_tokens=100,
    target_calls=100,
    steps=100,
    seconds={"prefill": 3.0, "draft": 0.0, "target": 10.0, "verify": 0.0, "rest": 0.0},
)


def drafting(target: float = 0.1, draft: float = 0.06, verify: float = 0.0, rest: float = 0.0) -> Statistics:
    """Return 1000 steps of a chain of three drafts, each accepted half of the time, with seconds per step."""
    calls = 1000
    seconds = {"draft": draft, "target": target, "verify": verify, "rest": rest}
    return Statistics(
        new_tokens=1875,
        target_calls=calls,
        steps=calls,
        offered_at=[1000, 500, 250],
        accepted_at=[500, 250, 125],
        seconds={"prefill": 1.0, **{name: calls * value for name, value in seconds.items()}},
    )


def test_where_the_formulas_assumptions_hold_all_agree_with_it() -> None:
    bound = bound_of(drafting(), PLAIN)
    expected = time_factor(0.5, 3, 0.2)
    assert (bound.chain, bound.passes, bound.steps) == pytest.approx((expected,) * 3)
    assert bound.tokens == pytest.approx(tokens_per_call(0.5, 3))
    assert (bound.draft, bound.target, bound.other) == pytest.approx((0.6, 1.0, 0.0))


def test_a_dearer_pass_and_verification_lower_one_bound_each() -> None:
    bound = bound_of(drafting(target=0.15, verify=0.02, rest=0.03), PLAIN)
    assert bound.chain == pytest.approx(time_factor(0.5, 3, 0.2))
    assert bound.passes == pytest.approx(1.875 / (0.6 + 1.5))
    assert bound.steps == pytest.approx(1.875 / (0.6 + 1.5 + 0.5))
    assert bound.chain > bound.passes > bound.steps


def test_plain_steps_cost_more_than_their_passes_too() -> None:
    slower = Statistics(target_calls=100, steps=100, seconds={**PLAIN.seconds, "rest": 5.0})
    assert bound_of(drafting(), slower).steps == pytest.approx(1.5 * time_factor(0.5, 3, 0.2))


def test_plain_decoding_is_bounded_by_one() -> None:
    bound = bound_of(PLAIN, PLAIN)
    assert (bound.tokens, bound.passes, bound.steps, bound.chain) == (1, 1, 1, None)


def test_drafts_of_changing_depth_have_no_chain_formula() -> None:
    lookup = drafting()
    lookup.offered_at, lookup.accepted_at = [200, 150, 100], [150, 100, 50]
    assert bound_of(lookup, PLAIN).chain is None


def test_without_times_there_is_no_bound() -> None:
    assert bound_of(Statistics(target_calls=1, steps=1), PLAIN) is None
    assert bound_of(drafting(), Statistics()) is None
