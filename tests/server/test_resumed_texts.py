"""Texts that go on from tokens that were told: every field counts these, and what is told goes on seamlessly."""

from typing import Any

import pytest
from serving import PROMPT

from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Ask, Event, GrammarRequest
from polydraft.server.worker.served import LoadedModels, load_served
from polydraft.server.worker.writing import Writing

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def served() -> LoadedModels:
    """Return the embedded pair in double precision."""
    return load_served(Settings(dtype="float64", batch_size=4))


def written(served: LoadedModels, **fields: Any) -> list[dict[str, Any]]:
    """Return what is told of the steps of a text."""
    said = list[Event]()
    writing = Writing(served, said.append)
    writing.take(Ask(**{"name": "a", "prompts": (PROMPT,), "seed": 3, "options": GREEDY, "max_tokens": 16, **fields}))
    while not writing.idle:
        writing.step()
    assert not [one for one in said if one.kind in ("refused", "failed")], said
    return [dict(one.said) for one in said if one.kind == "gained"]


def joined(steps: list[dict[str, Any]], name: str) -> list[Any]:
    return [one for step in steps for one in step.get(name, ())]


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence": 1.5, "frequency": 1.0},
    "grammar": {"grammar": GrammarRequest("regex", "[a-z ]{12,40}")},
    "json": {"grammar": GrammarRequest("json_object", None), "max_tokens": 24},
    "least": {"min_tokens": 14, "stop": ("n", "\n"), "bias": {0: 3.0}},
    "stop string": {"stop": ("function is the",), "max_tokens": 40},
    "log-probabilities": {"logprobs": 2, "stop": ("\n    Parameters",), "max_tokens": 30},
    "prediction": {"prediction": '    """\n    The function is the function.\n\n    Parameters\n'},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_greedy_text_goes_on_as_it_would_have(served: LoadedModels, fields: dict[str, Any]) -> None:
    whole = written(served, **fields)
    tokens = [one for step in whole for one in step["tokens"]]
    for count in range(1, len(whole)):
        told = whole[:count]
        before = [one for step in told for one in step["tokens"]]
        rest = written(served, told=tuple(before), unplaced=tuple(told[-1].get("unplaced", ())), **fields)
        assert before + [one for step in rest for one in step["tokens"]] == tokens
        assert "".join(step["text"] for step in told + rest) == "".join(step["text"] for step in whole)
        assert (rest[-1]["finish"], rest[-1]["stopped_by"]) == (whole[-1]["finish"], whole[-1]["stopped_by"])
        assert rest[-1]["predicted"] == whole[-1]["predicted"]
        expected, found = joined(whole, "logprobs"), joined(told, "logprobs") + joined(rest, "logprobs")
        assert [one["offset"] for one in found] == [one["offset"] for one in expected]
        assert [one["logprob"] for one in found] == pytest.approx([one["logprob"] for one in expected], abs=1e-9)


def test_a_sampled_text_goes_on_as_one_that_was_asked_for_behind_these_tokens(served: LoadedModels) -> None:
    """So its law is that of a text, which is proved elsewhere: the tokens are a prompt to whoever draws."""
    tokens, text = (served.tokenizer(one)["input_ids"] for one in (PROMPT, "    return fib(n"))
    for seed in range(4):
        heat = {"temperature": 1.0, "top_k": 0}
        rest = written(served, told=tuple(text), seed=seed, options=heat, max_tokens=len(text) + 10)
        direct = written(served, prompts=((*tokens, *text),), seed=seed, options=heat, max_tokens=10)
        assert joined(rest, "tokens") == joined(direct, "tokens") and len(joined(rest, "tokens")) == 10
