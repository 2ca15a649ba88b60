"""Queries come out of the passes that run anyway: with the cache's keys they give the attention that the model pays."""

from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor

from polydraft.models import HuggingFaceModel, Queries
from polydraft.reading import Features, Reader, Step, Text
from polydraft.trees import TokenTree, TreeShape, Verdict, topology

KINDS = ["llama", "qwen2", "gpt2", "gpt_neox", "mistral"]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def attention_of(model: HuggingFaceModel, queries: Queries, row: int, cache: Any, count: int) -> list[Tensor]:
    """Return "h q m" of every layer: the softmax of queries times keys, of which each token sees those before."""
    found, asking = [], queries.states[row].split(queries.widths, -1)
    for layer, own in enumerate(asking):
        keys = cache.select([row]).keys_of(layer, count)
        heads, _, width = keys.shape
        split = own.unflatten(-1, (-1, width)).transpose(0, 1)
        scores = split @ keys.repeat_interleave(len(split) // heads, 0).transpose(1, 2)
        later = torch.arange(count) > torch.arange(count - len(own), count).unsqueeze(-1)
        found.append(scores.masked_fill(later, -torch.inf).softmax(-1))
    return found


def weights_of(kind: str, text: list[int]) -> list[Tensor]:
    """Return the attention that the model's own code reports."""
    model = tiny_model(kind, attention="eager")
    with torch.no_grad():
        return [one[0] for one in model(torch.tensor([text]), output_attentions=True).attentions]


def close(found: list[Tensor], expected: list[Tensor], last: int) -> None:
    assert len(found) == len(expected)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs[:, -last:], atol=2e-6, rtol=0)  # theirs is in single precision


def text_of(rows: list[list[int]]) -> Text:
    tokens = torch.zeros(len(rows), 40, dtype=torch.int64)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    return Text(tokens, torch.tensor([len(own) for own in rows]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_give_the_models_attention(kind: str, fused: bool) -> None:
    module = tiny_model(kind)
    model, kernel = HuggingFaceModel(module, fused=fused), module.config._attn_implementation
    assert (model.fused is not None) == fused
    count, ids = len(TEXT), torch.tensor([TEXT])
    cache, mask = model.new_cache(1, 16), torch.ones(1, count, count, dtype=torch.bool).tril()
    given = (ids, torch.arange(count).unsqueeze(0), mask, cache, torch.tensor([0]))
    for last in (1, 4, count):
        found = model.forward(*given, queries=last)
        assert found.queries is not None and found.queries.states.shape[1] == last
        close(attention_of(model, found.queries, 0, cache, count), weights_of(kind, TEXT), last)
    assert model.forward(*given).queries is None
    assert module.config._attn_implementation == kernel, "nobody wrote into the configuration"


def test_a_pass_that_is_not_by_transformers_own_attention_hands_out_none() -> None:
    model = HuggingFaceModel(tiny_model("llama", attention="eager"), fused=False)
    reader, features = Reader.new(model, 1, 20, queries=4).catch_up(text_of([TEXT]))
    assert isinstance(features, Features) and features.queries is None and reader.read == (9,)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_reader_hands_out_those_of_the_newest_tokens(chunk: int | None) -> None:
    rows = [TEXT, [7, 7, 1], [5, 8, 5, 8, 5, 8]]
    text, model = text_of(rows), HuggingFaceModel(tiny_model())
    reader, told = Reader.new(model, 3, 40, queries=4), list[Features]()
    while reader.read != (9, 2, 5):
        reader, features = reader.catch_up(text, chunk)
        assert features is not None and features.queries is not None
        told.append(features)
    for row, own in enumerate(rows):
        for place in range(max(len(own) - 1 - (4 if chunk is None else 1), 0), len(own) - 1):
            known = next(query for query in (_at(one, row, place) for one in reversed(told)) if query is not None)
            close(
                attention_of(model, known, 0, reader.cache.select([row]), place + 1),
                weights_of("llama", own[: place + 1]),
                1,
            )


def _at(features: Features, row: int, place: int) -> Queries | None:
    """Return the queries of a row's token at a place, if they are there."""
    assert features.queries is not None
    places = features.places[row, -features.queries.states.shape[1] :].tolist()
    return features.queries[row : row + 1, places.index(place)][:, None] if place in places else None


@pytest.mark.parametrize("known", [None, 0, 2], ids=["all", "nothing", "two each"])
def test_a_step_has_those_of_unread_tokens_the_root_and_the_accepted_nodes(known: int | None) -> None:
    rows, model = [TEXT, [7, 7, 1]], HuggingFaceModel(tiny_model())
    text, reader = text_of(rows), Reader.new(model, 2, 40, queries=3)
    reader = reader if known == 0 else reader.catch_up(text, known)[0]
    shape = TreeShape(((2,), (2, 1)))
    tokens = torch.randint(24, (2, shape.size), generator=torch.Generator().manual_seed(2))
    tokens[:, 0] = text.last()
    tree = TokenTree(tokens, topology(shape, 2, torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))
    scored, reader = reader.score(text, tree)
    verdict = Verdict(torch.tensor([[2, 5], [1, -1]]), torch.tensor([2, 1]), torch.tensor([4, 4]))
    features = Step(text, tree, scored, scored.logits.softmax(-1), verdict).features
    reader = reader.keep(text, verdict)
    longer = [[*rows[0], *tokens[0, [2, 5]].tolist()], [*rows[1], int(tokens[1, 1])]]
    for row, own in enumerate(longer):
        for place in range(len(rows[row]) - 1, len(own)):
            query = _at(features, row, place)
            assert query is not None
            alone = reader.cache.select([row])
            close(attention_of(model, query, 0, alone, place + 1), weights_of("llama", own[: place + 1]), 1)
    if known is not None:
        assert _at(features, 0, 7) is not None and _at(features, 0, 5) is None, "three before the root"
