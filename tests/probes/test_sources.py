"""An encoder-decoder: a decoder whose cache holds its source, here a toy whose laws depend on source and whole text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft import Chain, ModelDrafter, NaiveMatch, NoDraft, SamplingParams, TopDown, Widths
from polydraft.drafters import Drafter
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, capacity_for, opened, read_on, step
from polydraft.models import Cache, Facts, Forward, LanguageModel
from polydraft.probs import Noise
from polydraft.reading import Text

VOCAB, GREEDY = 7, SamplingParams(temperature=0)
SOURCES, PROMPTS = [1, 5, 3], [[2, 4, 4], [1], [3, 6]]


class Memory(Cache):
    """Per row a source, and the token and place in every slot."""

    def __init__(self, sources: Sequence[int], capacity: int) -> None:
        self.sources, self.slots = torch.tensor(sources), torch.zeros(len(sources), capacity, dtype=torch.int64)

    def keep(self, base: Tensor, path: Tensor) -> None:
        kept = self.slots.clone()
        for row, nodes in enumerate(path.tolist()):
            for depth, node in enumerate(nodes):
                if node >= 0:
                    kept[row, base[row] + 1 + depth] = self.slots[row, base[row] + node]
        self.slots = kept

    def put(self, row: int, other: "Memory", length: int) -> "Memory":
        self.slots[row, :length], self.sources[row] = other.slots[0, :length], other.sources[0]
        return self


class Toy(LanguageModel):
    """Scores a token by a hash of the source and of all that it sees, each with its place."""

    facts = Facts(VOCAB, 64, torch.device("cpu"))  # type: ignore[assignment]

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Memory:
        return Memory([0] * batch if sources is None else sources, capacity)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Memory, starts: Tensor, **_: Any
    ) -> Forward:
        table = torch.randn(VOCAB * 64, VOCAB, generator=torch.Generator().manual_seed(0))
        slots = (starts.unsqueeze(-1) + torch.arange(tokens.shape[1])).clamp_min(0)
        cache.slots.scatter_(1, slots, tokens + VOCAB * positions)
        seen = mask.float() @ table[cache.slots[:, : mask.shape[-1]]]
        return Forward((5 * (seen * (1 + cache.sources.view(-1, 1, 1)))).sin() * 5, {})


def prompts(rows: Sequence[int]) -> Prompts:
    """Return prompts with their sources."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(PROMPTS[row]) for row in rows], batch_first=True)
    text = Text(tokens, torch.tensor([len(PROMPTS[row]) for row in rows]))
    laws, endings = [TargetLaw(GREEDY)] * len(rows), [Ending(max_length=20)] * len(rows)
    return Prompts(text, laws, endings, Noise.from_seed(0, len(rows)), [SOURCES[row] for row in rows])


def texts(drafter: Drafter, policy: Any, rows: Sequence[int]) -> list[list[int]]:
    model, method = Toy(), Method(drafter, TopDown(NaiveMatch()), policy)
    batch = begin(model, method, prompts([*rows[:-1], rows[0]]))
    if len(rows) > 1:  # the last text joins in place of another one
        newcomer = prompts(rows[-1:])
        room = capacity_for(method, newcomer.endings)
        batch = batch.put(len(rows) - 1, read_on(opened(model, method, newcomer, room)))
    while batch.going:
        batch, _, _ = step(batch)
    return [batch.text.tokens[row, :20].tolist() for row in range(len(rows))]


def test_rows_with_sources_write_what_they_write_plainly() -> None:
    plain = [texts(NoDraft(), Chain(1), [row])[0] for row in range(3)]
    assert len({tuple(text[-12:]) for text in plain}) == 3
    for policy in (Chain(3), Widths((2, 2))):
        assert texts(ModelDrafter(Toy()), policy, [0, 1, 2]) == plain
        assert [texts(ModelDrafter(Toy()), policy, [row])[0] for row in range(3)] == plain
