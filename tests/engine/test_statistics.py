"""The fold from blocks to statistics, on blocks made by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch

from polydraft.engine import Block, Emission, Statistics, summed
from polydraft.trees import TokenTree, Verdict

TREE = TokenTree.root_only(torch.tensor([0, 0]))
VERDICT = Verdict(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]), torch.tensor([1, 1]))


def block(**rows: Emission) -> Block:
    return Block({int(name.removeprefix("row")): gained for name, gained in rows.items()}, TREE, VERDICT)


TWO_OF_THREE = Emission((5, 6, 7), accepted=2, drafted=3, offered=3, kept=2)
ALL_OF_TWO = Emission((5, 6, 7), accepted=2, drafted=2, offered=2, kept=2)
NONE_OF_FOUR = Emission((8,), accepted=0, drafted=4, offered=1, kept=0)
WITHOUT_DRAFTS = Emission((9,), accepted=0, drafted=0, offered=0, kept=0)
CUT_SHORT = Emission((5,), accepted=1, drafted=3, offered=3, kept=3, finish="eos")


def folded(*blocks: Block) -> Statistics:
    statistics = Statistics()
    for one in blocks:
        statistics.add(one)
    return statistics


def test_before_the_first_block_ratios_are_undefined() -> None:
    empty = Statistics()
    assert math.isnan(empty.block_efficiency)
    assert math.isnan(empty.acceptance_rate)
    assert math.isnan(empty.tokens_per_second)
    assert empty.acceptance_by_depth == []
    assert empty.as_dict()["block_efficiency"] is None


def test_one_row() -> None:
    total = folded(block(row0=TWO_OF_THREE), block(row0=NONE_OF_FOUR), block(row0=ALL_OF_TWO))
    assert (total.steps, total.target_calls, total.new_tokens) == (3, 3, 7)
    assert (total.drafted, total.accepted) == (9, 4)
    assert total.offered_at == [3, 2, 1]
    assert total.accepted_at == [2, 2]
    assert total.acceptance_by_depth == pytest.approx([2 / 3, 1, 0])
    assert total.acceptance_rate == pytest.approx(4 / 6)
    assert total.block_efficiency == pytest.approx(7 / 3)


def test_rows_of_a_batch_count_as_calls_of_their_own_and_finished_rows_as_none() -> None:
    total = folded(block(row0=TWO_OF_THREE, row1=CUT_SHORT), block(row0=NONE_OF_FOUR))
    assert (total.steps, total.target_calls, total.new_tokens) == (2, 3, 5)
    assert total.accepted == 3  # drafts after the end of the text are kept by the verifier, but not emitted
    assert total.accepted_at == [2, 2, 1]
    assert total.block_efficiency == pytest.approx(5 / 3)


def test_plain_decoding_has_block_efficiency_one() -> None:
    total = folded(block(row0=WITHOUT_DRAFTS), block(row0=WITHOUT_DRAFTS))
    assert total.block_efficiency == 1
    assert math.isnan(total.acceptance_rate)
    assert total.acceptance_by_depth == []


def test_speed_counts_the_whole_time() -> None:
    total = folded(block(row0=TWO_OF_THREE))
    total.seconds = {"prefill": 0.5, "target": 0.5, "total": 1.5}
    assert total.tokens_per_second == pytest.approx(2)


def test_sums_equal_one_fold_over_all_blocks() -> None:
    first, second = [block(row0=TWO_OF_THREE), block(row0=CUT_SHORT)], [block(row0=NONE_OF_FOUR), block()]
    parts = [folded(*first), folded(*second)]
    parts[0].seconds, parts[1].seconds = {"total": 1.0, "draft": 0.25}, {"total": 2.0, "verify": 0.5}
    parts[1].fallback = "ValueError: late"
    total, whole = summed(parts), folded(*first, *second)
    whole.seconds, whole.fallback = {"total": 3.0, "draft": 0.25, "verify": 0.5}, "ValueError: late"
    assert total == whole
    assert parts[0].new_tokens == 4  # the parts stay as they were
    assert summed([]) == Statistics()


def test_a_dictionary_for_json() -> None:
    total = folded(block(row0=TWO_OF_THREE))
    total.seconds = {"total": 2.0}
    values = json.loads(json.dumps(total.as_dict(), allow_nan=False))
    assert values["new_tokens"] == 3
    assert values["block_efficiency"] == 3.0
    assert values["acceptance_by_depth"] == [1.0, 1.0, 0.0]
    assert values["acceptance_rate"] == pytest.approx(0.6667)
    assert values["tokens_per_second"] == 1.5
    assert values["fallback"] == ""
    json.dumps(Statistics().as_dict(), allow_nan=False)


def test_one_lossy_rule_makes_all_of_it_lossy() -> None:
    exact, lossy = replace(NONE_OF_FOUR, verifier="optimal"), replace(CUT_SHORT, verifier="typical", lossless=False)
    total = folded(block(row0=exact), block(row0=exact, row1=lossy), block(row0=exact))
    assert (total.verifier, total.lossless) == ("optimal; typical", False)
    assert (folded(block(row0=exact)).verifier, folded(block(row0=exact)).lossless) == ("optimal", True)


def test_a_gain_of_fewer_tokens_goes_on() -> None:
    assert CUT_SHORT.first(1) == CUT_SHORT and TWO_OF_THREE.first(3) == TWO_OF_THREE
    fewer = replace(TWO_OF_THREE, finish="eos").first(2)
    assert (fewer.tokens, fewer.accepted, fewer.kept, fewer.offered, fewer.finish) == ((5, 6), 2, 2, 2, "")
    assert TWO_OF_THREE.first(1).accepted == 1 and fewer.drafted == 3
