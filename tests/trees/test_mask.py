import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polydraft.trees import EAGLE_25, Topology, causal_mask, topology, tree_mask


def tree_mask_by_hand(parents: list[int], length: int, slots: int) -> list[list[bool]]:
    rows = []
    for node in range(len(parents)):
        seen = set(range(length))
        while node >= 0:
            seen.add(length + node)
            node = parents[node]
        rows.append([slot in seen for slot in range(slots)])
    return rows


@given(st.data(), st.sampled_from([1, 3]), st.integers(1, 6), st.integers(0, 3))
def test_nodes_see_the_committed_tokens_and_their_ancestors(data: st.DataObject, batch: int, size: int, spare: int):
    forest = [[-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(batch)]
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    slots = max(lengths) + size + spare
    mask = tree_mask(Topology(torch.tensor(forest)).ancestors, torch.tensor(lengths), slots)
    expected = [tree_mask_by_hand(parents, length, slots) for parents, length in zip(forest, lengths, strict=True)]
    assert mask.tolist() == expected


@pytest.mark.parametrize("lengths", [[7], [7, 2, 5]])
def test_a_frontier_gets_its_rows_of_the_whole_mask(lengths: list[int]):
    views = topology(EAGLE_25, len(lengths), torch.device("cpu"))
    level, slots = EAGLE_25.levels[2], max(lengths) + EAGLE_25.size
    whole = tree_mask(views.ancestors, torch.tensor(lengths), slots)
    part = tree_mask(views.ancestors[:, level.start : level.stop, : level.stop], torch.tensor(lengths), slots)
    assert torch.equal(part, whole[:, level.start : level.stop])


def test_prompt_tokens_see_themselves_and_those_before_them():
    lengths, width = [4, 1, 3, 0], 5
    mask = causal_mask(torch.tensor(lengths), width)
    for b, length in enumerate(lengths):
        for token in range(width):
            visible = [slot <= token and slot < max(length, 1) for slot in range(width)]
            assert mask[b, token].tolist() == visible
            assert any(visible), "attention over nothing is not defined"
