"""TreesBelow below a text that was read once give the logits of ordinary passes over each path."""

from functools import cache

import torch
from doubles import plain_logits, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.models import HuggingFaceModel
from polydraft.trees import TokenTree, Widths, topology
from polydraft_lab.limits.reading import Reading, TreesBelow, read

TEXT = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
ROOTS = torch.tensor([0, 4, 7])
SHAPE = Widths((2, 2)).shape


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama", 24)


def reading() -> Reading:
    return read(HuggingFaceModel(model()), TEXT, keep=3, room=len(ROOTS) * SHAPE.size)


def trees() -> TokenTree:
    tokens = torch.randint(24, (len(ROOTS), SHAPE.size), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = TEXT[ROOTS]
    return TokenTree(tokens, topology(SHAPE, len(ROOTS), tokens.device), torch.ones_like(tokens, dtype=torch.bool))


def expected(tree: TokenTree, row: int, node: int) -> Tensor:
    path = tree.tokens[row, tree.ancestors[row, node]].tolist()
    return plain_logits(model(), [*TEXT[: ROOTS[row]].tolist(), *path])


def test_the_last_rows_of_a_text() -> None:
    rows = [plain_logits(model(), TEXT[:length].tolist()) for length in (6, 7, 8)]
    torch.testing.assert_close(reading().logits, torch.stack(rows), rtol=1e-9, atol=1e-9)


def test_all_nodes_of_all_trees_at_once() -> None:
    tree = trees()
    logits = TreesBelow(reading(), ROOTS, SHAPE.size).score(range(SHAPE.size), tree.tokens, tree.depth, tree.ancestors)
    for row in range(len(ROOTS)):
        for node in range(SHAPE.size):
            torch.testing.assert_close(logits[row, node], expected(tree, row, node), rtol=1e-9, atol=1e-9)


def test_level_by_level_and_twice_below_one_text() -> None:
    tree, text = trees(), reading()
    for _ in range(2):
        branches = TreesBelow(text, ROOTS, SHAPE.size)
        for level in SHAPE.levels:
            nodes = slice(level.start, level.stop)
            ancestors = tree.ancestors[:, nodes, : level.stop]
            logits = branches.score(level, tree.tokens[:, nodes], tree.depth[:, nodes], ancestors)
            for row in range(len(ROOTS)):
                for place, node in enumerate(level):
                    torch.testing.assert_close(logits[row, place], expected(tree, row, node), rtol=1e-9, atol=1e-9)
