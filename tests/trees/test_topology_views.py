"""The views that verifiers from the leaves up need, against the same thing written recursively."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from polydraft.trees import EAGLE_25, Topology, topology

any_parents = st.integers(1, 12).flatmap(
    lambda size: st.tuples(st.just(-1), *(st.integers(0, node - 1) for node in range(1, size)))
)


def visited(parents: tuple[int, ...], node: int = 0) -> list[int]:
    """Return the nodes below and including `node`, children before parents."""
    children = [child for child, parent in enumerate(parents) if parent == node]
    return [below for child in children for below in visited(parents, child)] + [node]


@given(parents=any_parents)
def test_post_order(parents: tuple[int, ...]) -> None:
    order = Topology(torch.tensor([parents])).post_order[0].tolist()
    assert sorted(range(len(parents)), key=order.__getitem__) == visited(parents)


@given(
    rows=st.integers(1, 9).flatmap(
        lambda size: st.lists(
            st.tuples(st.just(-1), *(st.integers(0, node - 1) for node in range(1, size))), min_size=1, max_size=3
        )
    )
)
def test_levels_hold_every_node_once_in_rows_of_different_trees(rows: list[tuple[int, ...]]) -> None:
    tree = Topology(torch.tensor(rows))
    assert len(tree.levels) == tree.height + 1
    for row, parents in enumerate(rows):
        found = [[node for node in level.nodes[row].tolist() if node >= 0] for level in tree.levels]
        assert sorted(node for nodes in found for node in nodes) == list(range(len(parents)))
        for depth, nodes in enumerate(found):
            assert nodes == sorted(nodes)
            assert all(int(tree.depth[row, node]) == depth for node in nodes)
            assert max((parents.count(node) for node in nodes), default=0) <= tree.levels[depth].width
    assert tree.inner == 1 + max(max(parents) for parents in rows)


def test_what_belongs_to_children() -> None:
    tree = topology(EAGLE_25, 2, torch.device("cpu"))
    values = torch.arange(2 * EAGLE_25.size).view(2, -1) * 10
    expected = torch.where(tree.children >= 0, values[:, tree.children[0].clamp_min(0)], -7)
    assert torch.equal(tree.of_children(values, -7), expected)
