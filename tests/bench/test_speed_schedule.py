"""The order of measurements: full batches of one task, all settings, every arm somewhere in each round."""

from collections import Counter

import pytest

from polydraft.bench import Prompt
from polydraft.bench.speed import SpeedSettings, left_out, rounds
from polydraft.errors import InvalidParameter

PROMPTS = [Prompt(str(number), task, "x") for number in range(5) for task in ("a", "b")][:-2]  # four of each


def test_all_combinations_come_once_with_repeats_last_and_tasks_in_turn() -> None:
    found = rounds(PROMPTS, SpeedSettings(temperatures=(0.0, 0.5), batch_sizes=(1, 2), repeats=2))
    assert len({one.key for one in found}) == len(found) == 2 * 2 * (8 + 4)
    assert [one.repeat for one in found] == [0] * 24 + [1] * 24
    assert [one.prompts[0].task for one in found if one.key[2:] == (0.0, 1, 0)] == ["a", "b"] * 4
    assert all(len({prompt.task for prompt in one.prompts}) == 1 for one in found)
    assert Counter(len(one.prompts) for one in found[:4]) == {1: 2, 2: 2}  # sizes alternate too


def test_what_fills_no_batch_is_left_out_and_said() -> None:
    settings = SpeedSettings(batch_sizes=(1, 3))
    assert left_out(PROMPTS, settings) == {3: 2}
    names = [one.key[1] for one in rounds(PROMPTS, settings) if len(one.prompts) == 3]
    assert set(names) == {("0", "1", "2")}
    with pytest.raises(InvalidParameter, match="Batches of 5 need as many prompts of a task; the largest has 4"):
        rounds(PROMPTS, SpeedSettings(batch_sizes=(5,)))


def test_arms_take_turns_in_an_order_of_each_round_that_does_not_change() -> None:
    found = rounds(PROMPTS * 1, SpeedSettings(temperatures=(0.0,), repeats=30))
    orders = [one.order(3, seed=0) for one in found]
    assert orders == [one.order(3, seed=0) for one in found]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    first = Counter(order[0] for order in orders)
    assert min(first.values()) > 50  # of 240; the chance of fewer is below 1e-4 for a fair order, and this one is fixed
    assert orders != [one.order(3, seed=1) for one in found]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperatures": (-1.0,)},
        {"temperatures": ()},
        {"temperatures": (0.5, 0.5)},
        {"batch_sizes": (0,)},
        {"batch_sizes": ()},
        {"repeats": 0},
        {"max_new_tokens": 0},
        {"seed": -1},
    ],
)
def test_a_plan_refuses_what_cannot_be_measured(wrong: dict) -> None:
    with pytest.raises(InvalidParameter, match=r"temperature|batch_sizes|repeats|max_new_tokens|seed"):
        SpeedSettings(**wrong)
