"""One pass over a token tree gives what separate passes over its paths give, for every family and kernel."""

import pytest
import torch
from doubles import TREE_KINDS, plain_logits, tiny_model
from torch import Tensor

from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel, TreeCache
from polydraft.trees import EAGLE_25, TreeShape, causal_mask, topology, tree_mask

VOCAB = 24
RANDOM_SHAPE = TreeShape(((3,), (0, 2, 1), (1, 0, 3), (2, 1, 0, 1)))
LENGTHS = {1: (6,), 3: (1, 9, 4)}
TOLERANCES = {
    (torch.float32, "sdpa"): 1e-5,
    (torch.float32, "eager"): 1e-5,
    (torch.float64, "sdpa"): 1e-10,
    (torch.float64, "eager"): 1e-6,  # the models' own eager attention computes its softmax in single precision
}
COMBINATIONS = [
    pytest.param(kind, dtype, attention, id=f"{kind}-{str(dtype).removeprefix('torch.')}-{attention}")
    for kind in TREE_KINDS
    for dtype, attention in TOLERANCES
]


class Scored:
    """A batch of prompts and one tree per row, scored in one pass after a prefill."""

    def __init__(self, kind: str, dtype: torch.dtype, attention: str, shape: TreeShape, batch: int) -> None:
        self.model = tiny_model(kind, VOCAB, dtype=dtype, attention=attention)
        self.door = HuggingFaceModel(self.model)
        self.shape = shape
        stream = torch.Generator().manual_seed(batch)
        self.prompts = [torch.randint(VOCAB, (n,), generator=stream).tolist() for n in LENGTHS[batch]]
        self.tree = topology(shape, batch, torch.device("cpu"))
        self.tokens = torch.randint(VOCAB, (batch, shape.size), generator=stream)
        self.tokens[:, 0] = torch.tensor([prompt[-1] for prompt in self.prompts])
        self.base = torch.tensor([len(prompt) - 1 for prompt in self.prompts])
        self.cache = self.door.new_cache(batch, int(self.base.max()) + 2 * shape.size)
        with torch.no_grad():
            self._prefill()
            self.logits = self._score_tree()

    def _prefill(self) -> None:
        width = int(self.base.max())
        tokens = torch.full((len(self.prompts), width), VOCAB - 1)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt) - 1] = torch.tensor(prompt[:-1])
        positions = torch.arange(width).expand(len(self.prompts), width)
        starts = torch.zeros_like(self.base)
        self.prefilled = self.door.forward(tokens, positions, causal_mask(self.base, width), self.cache, starts).logits

    def _score_tree(self) -> Tensor:
        mask = tree_mask(self.tree.ancestors, self.base, int(self.base.max()) + self.shape.size)
        positions = self.base.unsqueeze(-1) + self.tree.depth
        return self.door.forward(self.tokens, positions, mask, self.cache, self.base).logits

    def path(self, row: int, node: int) -> list[int]:
        """Return the text that ends at a node."""
        nodes = self.tree.ancestors[row, node].nonzero().squeeze(-1)
        return self.prompts[row][:-1] + self.tokens[row, nodes].tolist()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [EAGLE_25, RANDOM_SHAPE], ids=["eagle", "random"])
@pytest.mark.parametrize(("kind", "dtype", "attention"), COMBINATIONS)
def test_tree_rows_equal_path_rows(kind: str, dtype: torch.dtype, attention: str, shape: TreeShape, batch: int) -> None:
    scored = Scored(kind, dtype, attention, shape, batch)
    expected = torch.stack(
        [
            torch.stack([plain_logits(scored.model, scored.path(row, node)) for node in range(shape.size)])
            for row in range(batch)
        ]
    )
    tolerance = TOLERANCES[dtype, attention] * float(expected.abs().max().clamp_min(1))
    assert (scored.logits - expected).abs().max() <= tolerance


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("kind", "dtype", "attention"), COMBINATIONS)
def test_after_keeping_a_path_the_cache_is_that_of_the_text(
    kind: str, dtype: torch.dtype, attention: str, batch: int
) -> None:
    scored = Scored(kind, dtype, attention, EAGLE_25, batch)
    ends = (20, 25, 0)[:batch]  # a path that ends early, the deepest one, and none
    paths = torch.full((batch, EAGLE_25.depth), -1)
    for row, end in enumerate(ends):
        nodes = scored.tree.ancestors[row, end, 1:].nonzero().squeeze(-1) + 1
        paths[row, : len(nodes)] = nodes
    texts = [scored.path(row, end) for row, end in enumerate(ends)]
    scored.cache.keep(scored.base, paths)
    tokens = torch.tensor([[7, 3]] * batch)
    starts = torch.tensor([len(text) for text in texts])
    mask = tree_mask(torch.ones(2, 2, dtype=torch.bool).tril().repeat(batch, 1, 1), starts, int(starts.max()) + 2)
    positions = starts.unsqueeze(-1) + torch.arange(2)
    with torch.no_grad():
        logits = scored.door.forward(tokens, positions, mask, scored.cache, starts).logits
    assert max(map(len, texts)) > max(map(len, scored.prompts))
    for row, text in enumerate(texts):
        for place, more in enumerate(([7], [7, 3])):
            expected = plain_logits(scored.model, text + more)
            tolerance = TOLERANCES[dtype, attention] * float(expected.abs().max().clamp_min(1))
            assert (logits[row, place] - expected).abs().max() <= tolerance


@pytest.mark.parametrize(("kind", "dtype", "attention"), COMBINATIONS)
def test_a_lone_token_sees_the_whole_text(kind: str, dtype: torch.dtype, attention: str) -> None:
    scored = Scored(kind, dtype, attention, EAGLE_25, 1)
    text = scored.prompts[0]
    start = scored.base
    logits = scored.door.forward(
        torch.tensor([[text[-1]]]),
        start.unsqueeze(-1),
        torch.ones(1, 1, len(text), dtype=torch.bool),
        scored.cache,
        start,
    ).logits
    expected = plain_logits(scored.model, text)
    tolerance = TOLERANCES[dtype, attention] * float(expected.abs().max().clamp_min(1))
    assert (logits[0, 0] - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_ragged_prefill(kind: str) -> None:
    scored = Scored(kind, torch.float64, "sdpa", EAGLE_25, 3)
    for row, prompt in enumerate(scored.prompts):
        for place in range(len(prompt) - 1):
            expected = plain_logits(scored.model, prompt[: place + 1])
            assert torch.allclose(scored.prefilled[row, place], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_hidden_states_and_kept_logits(kind: str) -> None:
    model = tiny_model(kind, VOCAB)
    door = HuggingFaceModel(model)
    tokens, positions, starts = torch.tensor([[3, 1, 4]]), torch.arange(3).unsqueeze(0), torch.tensor([0])
    with torch.no_grad():
        full = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        mask = causal_mask(torch.tensor([3]), 3)
        passed = door.forward(
            tokens, positions, mask, door.new_cache(1, 3), starts, hidden_layers=(0, 1), logits_to_keep=1
        )
    assert sorted(passed.hidden) == [0, 1]
    for layer, hidden in passed.hidden.items():
        assert torch.allclose(hidden, full.hidden_states[layer], atol=1e-10)
    assert passed.logits.shape == (1, 1, VOCAB)
    assert torch.allclose(passed.logits[:, -1], full.logits[:, -1], atol=1e-10)


def test_a_cache_that_is_too_small_says_so() -> None:
    cache = TreeCache(layers=1, batch=1, capacity=4)
    with pytest.raises(UnsupportedModel, match="has 4 slots, but 5 are needed"):
        cache.place(torch.tensor([2]), 3, 5)
