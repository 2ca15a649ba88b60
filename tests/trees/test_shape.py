import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polydraft.errors import InvalidParameter
from polydraft.trees import EAGLE_25, FALCON_165, MEDUSA_63, Topology, TreeShape, topology


@st.composite
def level_counts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Draw up to four levels; counts may be zero and trailing ones left out."""
    counts, nodes = [], 1
    for _ in range(draw(st.integers(0, 4))):
        level = draw(st.lists(st.integers(0, 3), min_size=1, max_size=min(nodes, 4)).filter(any))
        counts.append(tuple(level))
        nodes = sum(level)
    return tuple(counts)


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Draw parents of three trees of one size, in any order that puts parents before children."""
    size = draw(st.integers(1, 9))
    return [[-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(3)]


def parents_by_hand(shape: TreeShape) -> list[int]:
    """Hand out numbers breadth first, with a queue of the nodes of the level above."""
    parents, level = [-1], [0]
    for counts in shape.counts:
        fresh = []
        for node, count in zip(level, counts, strict=False):
            for _ in range(count):
                fresh.append(len(parents))
                parents.append(node)
        level = fresh
    return parents


def path_by_hand(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@pytest.mark.parametrize(
    ("shape", "drafts_per_depth"),
    [
        (EAGLE_25, [4, 8, 8, 3, 2]),
        (MEDUSA_63, [10, 28, 23, 2]),
        (FALCON_165, [20, 15, 19, 23, 21, 23, 21, 23]),
    ],
    ids=["eagle", "medusa", "falcon"],
)
def test_published_trees_have_their_published_sizes(shape: TreeShape, drafts_per_depth: list[int]):
    assert [len(level) for level in shape.levels] == [1, *drafts_per_depth]
    assert shape.size == 1 + sum(drafts_per_depth)
    assert shape.depth == len(drafts_per_depth)


def test_the_example_of_the_docstring():
    shape = TreeShape(((4,), (3, 2, 2, 1), (3,)))
    assert shape.parents == (-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5)
    assert shape.ranks == (0, 0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 0, 0, 1, 2)
    assert (shape.size, shape.depth, shape.max_children) == (16, 3, 4)


@given(level_counts())
def test_shapes_number_their_nodes_breadth_first(counts: tuple[tuple[int, ...], ...]):
    shape = TreeShape(counts)
    parents = parents_by_hand(shape)
    assert list(shape.parents) == parents
    assert shape.size == len(parents)
    depths = [len(path_by_hand(parents, node)) - 1 for node in range(len(parents))]
    assert shape.depth == max(depths)
    assert [depth for depth, level in enumerate(shape.levels) for _ in level] == depths
    assert [node for level in shape.levels for node in level] == list(range(shape.size))
    assert shape.max_children == max(parents.count(node) for node in range(len(parents)))
    assert list(shape.ranks) == [parents[:node].count(parents[node]) for node in range(len(parents))]


@given(forests())
def test_views_of_a_topology_agree_with_a_walk_along_the_parents(forest: list[list[int]]):
    views = Topology(torch.tensor(forest))
    for b, parents in enumerate(forest):
        nodes = range(len(parents))
        paths = [path_by_hand(parents, node) for node in nodes]
        assert views.ancestors[b].tolist() == [[other in paths[node] for other in nodes] for node in nodes]
        assert views.depth[b].tolist() == [len(path) - 1 for path in paths]
        assert views.rank[b].tolist() == [parents[:node].count(parents[node]) for node in nodes]
        families = [[child for child in nodes if parents[child] == node] for node in nodes]
        width = max(1, *(len([c for c in range(len(p)) if p[c] == n]) for p in forest for n in range(len(p))))
        assert views.children[b].tolist() == [family + [-1] * (width - len(family)) for family in families]


def test_equal_shapes_share_their_topology():
    one = topology(TreeShape(((2,), (1, 1))), 3, torch.device("cpu"))
    assert topology(TreeShape(((2,), (1, 1))), 3, torch.device("cpu")) is one
    assert one.parents.tolist() == [[-1, 0, 0, 1, 2]] * 3


@pytest.mark.parametrize(
    "counts",
    [((1, 1),), ((2,), (1, 1, 1)), ((2,), (-1, 2)), ((0,),), ((2,), (0, 0)), ((),), ((4096,),)],
)
def test_impossible_shapes_are_refused(counts: tuple[tuple[int, ...], ...]):
    with pytest.raises(InvalidParameter):
        TreeShape(counts)


def test_the_root_alone_and_the_largest_tree_are_shapes():
    assert TreeShape(()).levels == (range(1),)
    assert TreeShape(((4095,),)).size == 4096
