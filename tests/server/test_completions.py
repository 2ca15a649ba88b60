"""`/v1/completions` as the real client of OpenAI sees it: streams, seeds, choices, fields of our own, errors."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import MODEL, PROMPT, alone, served

from polydraft.models import Pair

openai = pytest.importorskip("openai")
FIELDS: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(batch_size=4) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as found:
        yield found


def test_a_seed_gives_its_text(client: Any, pair: Pair) -> None:
    answer = client.completions.create(**FIELDS, seed=5, temperature=0.9)
    assert answer.choices[0].text == alone(pair, PROMPT, seed=5, temperature=0.9, max_new_tokens=12)
    assert answer.object == "text_completion" and answer.model == MODEL and answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.polydraft["seeds"]) == (12, [5])


def test_a_stream_is_the_text_in_pieces(client: Any, pair: Pair) -> None:
    parts = list(client.completions.create(**FIELDS, seed=5, stream=True, stream_options={"include_usage": True}))
    text = "".join(one.choices[0].text for one in parts[:-1])
    assert text == alone(pair, PROMPT, seed=5, temperature=1.0, max_new_tokens=12) and len(parts) > 2
    assert parts[-2].choices[0].finish_reason == "length" and not parts[-1].choices
    assert parts[-1].usage.completion_tokens == 12 and all(one.usage is None for one in parts[:-1])


def test_choices_have_texts_and_seeds_of_their_own(client: Any, pair: Pair) -> None:
    answer = client.completions.create(**FIELDS, n=3, seed=2, logprobs=2)
    assert [one.index for one in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 36
    for one, seed in zip(answer.choices, answer.polydraft["seeds"], strict=True):
        assert one.text == alone(pair, PROMPT, seed=seed, temperature=1.0, max_new_tokens=12)
        assert "".join(one.logprobs.tokens) == one.text and len(one.logprobs.token_logprobs) == 12
        assert all(len(top) <= 2 for top in one.logprobs.top_logprobs)
    assert len({one.text for one in answer.choices}) == 3


def test_drafts_are_asked_for_beside_the_clients_own_fields(client: Any) -> None:
    def told(**speculative: Any) -> dict[str, Any]:
        extra = {"speculative": speculative}
        answer = client.completions.create(**FIELDS, temperature=0, extra_body=extra)
        return answer.metrics["speculative_decoding"]

    trees = told(drafter="model", tree="3,2")
    assert trees["num_draft_tokens"] == 9 * trees["num_spec_steps"] > 0 and [*trees["sources"]] == ["model"]
    assert told(enabled=False)["num_draft_tokens"] == 0


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.completions.create(**FIELDS, temperature=-1)
    assert (found.value.param, found.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.BadRequestError, match=r"speculative\.drafter|nobody") as found:
        client.completions.create(**FIELDS, extra_body={"speculative": {"drafter": "nobody"}})
    assert found.value.param == "speculative.drafter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**FIELDS, "model": "other"})
