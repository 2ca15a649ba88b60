"""Shape search against listing every shape."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch

from polydraft.errors import InvalidParameter
from polydraft.theory import block_efficiency
from polydraft.trees import EAGLE_25, Acceptance, TreeShape, best_shape, expected_tokens, fastest_shape, step_seconds

NODES, DEPTH, CHILDREN = 7, 4, 3
ROOT = TreeShape(())


@cache
def every_shape() -> list[TreeShape]:
    """List all trees of at most 7 nodes, 4 levels and 3 children of a node."""

    def below(counts: tuple[tuple[int, ...], ...], parents: int, left: int) -> Iterator[TreeShape]:
        yield TreeShape(counts)
        if len(counts) < DEPTH:
            for level in product(range(CHILDREN + 1), repeat=parents):
                if 0 < sum(level) <= left:
                    kept = max(place for place, count in enumerate(level) if count) + 1
                    yield from below((*counts, level[:kept]), sum(level), left - sum(level))

    return list(dict.fromkeys(below((), 1, NODES - 1)))


def drawn(stream: random.Random) -> Acceptance:
    """Draw rates that depend on depth and number of children."""

    def row(children: int) -> tuple[float, ...]:
        weights = [stream.random() for _ in range(children)]
        total = stream.uniform(0.3, 1)
        return tuple(total * weight / sum(weights) for weight in weights)

    depths = range(stream.randint(1, 3))
    return Acceptance(tuple(tuple(row(children) for children in range(1, CHILDREN + 1)) for _ in depths))


def test_expected_tokens_by_hand() -> None:
    shape = TreeShape(((2,), (1, 2)))
    assert expected_tokens(shape, [0.5, 0.25]) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.5 + 0.25 * (0.5 + 0.25))
    deeper = Acceptance((((0.9,), (0.5, 0.25)), ((0.6,), (0.4, 0.1))))
    assert expected_tokens(shape, deeper) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.6 + 0.25 * (0.4 + 0.1))
    assert expected_tokens(ROOT, deeper) == 1


def test_expected_tokens_are_theorys_block_efficiency() -> None:
    ranks = [0.4, 0.3, 0.15, 0.05]
    branching = torch.tensor([ranks[rank] for rank in EAGLE_25.ranks], dtype=torch.float64)
    assert expected_tokens(EAGLE_25, ranks) == pytest.approx(float(block_efficiency(EAGLE_25.parents, branching)))


def test_the_best_shape_is_the_best_of_all() -> None:
    assert len(every_shape()) == 151
    for seed in range(40):
        rates = drawn(random.Random(seed))
        tokens = {shape: expected_tokens(shape, rates) for shape in every_shape()}
        for nodes in range(1, NODES + 1):
            for depth in range(DEPTH + 1):
                found = best_shape(rates, nodes, depth)
                most = max(value for shape, value in tokens.items() if shape.size <= nodes and shape.depth <= depth)
                assert found.size <= nodes and found.depth <= depth
                assert expected_tokens(found, rates) == pytest.approx(most, abs=1e-12)


def test_with_depth_to_spare_the_likeliest_nodes_are_the_best() -> None:
    """Under the positional assumption a tree of n nodes is best if it holds the n nodes reached most often."""
    ranks = [0.55, 0.2, 0.1, 0.05]
    reached = sorted((p for length in range(9) for p in chances(ranks, length)), reverse=True)
    for nodes in range(1, 9):
        found = best_shape(ranks, nodes, nodes)
        assert found.size == nodes
        assert expected_tokens(found, ranks) == pytest.approx(sum(reached[:nodes]))


def chances(ranks: list[float], length: int) -> list[float]:
    paths = [1.0]
    for _ in range(length):
        paths = [path * rate for path in paths for rate in ranks]
    return paths


@pytest.mark.parametrize("level", [0.0, 0.15, 0.5])
def test_the_fastest_shape_is_the_fastest_of_all_if_a_level_costs_the_same_for_any_width(level: float) -> None:
    sizes = set()
    for seed in range(60):
        stream = random.Random(seed)
        rates, dear, overhead = drawn(stream), stream.uniform(0, 0.3), stream.uniform(0, 0.3)

        def speed(shape: TreeShape, rates=rates, dear=dear, overhead=overhead) -> float:
            seconds = step_seconds(shape, lambda nodes: 1 + dear * nodes, lambda width: level, overhead)
            return expected_tokens(shape, rates) / seconds

        found = fastest_shape(
            rates,
            lambda nodes, dear=dear: 1 + dear * nodes,
            lambda width: level,
            max_nodes=NODES,
            max_depth=DEPTH,
            overhead=overhead,
        )
        assert speed(found) == pytest.approx(max(map(speed, every_shape())), abs=1e-12)
        sizes.add(found.size)
    assert len(sizes) > 2  # the costs matter


def test_where_wide_levels_are_dear_the_fastest_shape_is_near_the_fastest_of_all() -> None:
    missed = []
    for seed in range(100):
        stream = random.Random(seed)
        rates, dear, wide = drawn(stream), stream.uniform(0, 0.1), stream.uniform(0, 0.3)

        def speed(shape: TreeShape, rates=rates, dear=dear, wide=wide) -> float:
            return expected_tokens(shape, rates) / step_seconds(shape, lambda n: 1 + dear * n, lambda f: wide * f)

        found = fastest_shape(
            rates,
            lambda n, dear=dear: 1 + dear * n,
            lambda f, wide=wide: wide * f,
            max_nodes=NODES,
            max_depth=DEPTH,
        )
        missed.append(1 - speed(found) / max(map(speed, every_shape())))
    assert max(missed) < 0.1 and sum(miss > 1e-9 for miss in missed) < 10


def test_drafting_that_does_not_pay_is_plain_decoding() -> None:
    assert fastest_shape([0.3, 0.1], lambda n: 1.0 + n, lambda f: 0.1, max_nodes=16, max_depth=4) == ROOT
    assert fastest_shape([0.3], lambda n: 1.0, lambda f: 0.0, max_nodes=16, max_depth=4, overhead=0.5) == ROOT
    assert fastest_shape([0.3], lambda n: 1.0, lambda f: 0.0, max_nodes=2, max_depth=4).size == 2
    nothing = Acceptance((((), ()),))
    assert fastest_shape(nothing, lambda n: 1.0, lambda f: 0.0, max_nodes=16, max_depth=4) == ROOT
    assert best_shape([0.0, 0.0], 16, 4) == ROOT


def test_free_nodes_are_all_used_and_dear_depth_makes_trees_shallow() -> None:
    ranks = [0.5, 0.2, 0.1]
    free = fastest_shape(ranks, lambda n: 1.0, lambda f: 0.0, max_nodes=16, max_depth=8)
    assert free == best_shape(ranks, 16, 8) and free.size == 16
    dear = fastest_shape(ranks, lambda n: 1.0, lambda f: 0.4, max_nodes=16, max_depth=8)
    assert 0 < dear.depth < free.depth


def test_numbers_of_children_without_rates_do_not_occur() -> None:
    one = Acceptance((((0.9,), (), ()),))
    assert best_shape(one, 6, 8) == TreeShape(((1,),) * 5)
    two = Acceptance((((), (0.5, 0.3)),))
    assert best_shape(two, 4, 8) == TreeShape(((2,),))  # a fourth node would be an only child
    assert two.at(0, 1) == () and two.at(5, 2) == (0.5, 0.3) and two.at(0, 3) == ()
    with pytest.raises(InvalidParameter, match="no acceptance rates of 1 children at depth 1"):
        expected_tokens(TreeShape(((2,), (1,))), two)


@pytest.mark.parametrize("rates", [(), (((0.5, 0.5),),), (((-0.1,),),), (((0.9,), (0.7, 0.4)),), (((float("nan"),),),)])
def test_rates_that_are_no_probabilities_are_refused(rates: tuple) -> None:
    with pytest.raises(InvalidParameter):
        Acceptance(rates)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (-1, 3), (4097, 3), (4, -1)])
def test_impossible_budgets_are_refused(nodes: int, depth: int) -> None:
    with pytest.raises(InvalidParameter):
        best_shape([0.5], nodes, depth)
