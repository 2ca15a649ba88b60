"""`return_token_ids` and `prompt_logprobs`, in the shapes that vLLM has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import save_chat_model
from fastapi.testclient import TestClient
from serving import PROMPT, ask, chunks, client, error

from polydraft.models import Pair

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


def test_tokens_are_told_with_texts_and_prompts(app: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer(PROMPT)["input_ids"]
    answer = ask(app, n=2, seed=3, prompt=[ids, ids[:2]], temperature=1, return_token_ids=True, ignore_eos=True)
    for number, one in enumerate(answer["choices"]):
        assert one["prompt_token_ids"] == (ids if number < 2 else ids[:2])
        assert len(one["token_ids"]) == 8
        assert pair.tokenizer.decode(one["token_ids"], skip_special_tokens=True) == one["text"]
    plain = ask(app, seed=3, prompt=ids)["choices"][0]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & plain.keys()


def test_an_end_of_text_is_among_the_tokens(app: TestClient, pair: Pair) -> None:
    end = pair.tokenizer.eos_token_id
    answer = ask(app, temperature=0, logit_bias={str(end): 100}, return_token_ids=True)["choices"][0]
    assert answer["token_ids"] == [end] and answer["finish_reason"] == "stop" and answer["text"] == ""


def test_streams_tell_tokens_piece_by_piece(app: TestClient, pair: Pair) -> None:
    whole = ask(app, seed=4, n=2, temperature=1, return_token_ids=True, echo=True)
    parts = chunks(app, seed=4, n=2, temperature=1, return_token_ids=True)
    for number, one in enumerate(whole["choices"]):
        own = [piece for part in parts for piece in part["choices"] if piece["index"] == number]
        assert own[0]["prompt_token_ids"] == one["prompt_token_ids"] == pair.tokenizer(PROMPT)["input_ids"]
        assert [token for piece in own for token in piece.get("token_ids", ())] == one["token_ids"]
        assert one["text"].startswith(PROMPT)


def test_chats_have_the_prompt_once(tmp_path: Path) -> None:
    with client(target=str(save_chat_model(tmp_path / "chat"))) as app:
        fields: dict[str, Any] = {"messages": MESSAGES, "seed": 1, "max_tokens": 4, "return_token_ids": True}
        found = ask(app, **fields, n=2, prompt_logprobs=1)
        assert [len(one["token_ids"]) for one in found["choices"]] == [4, 4]
        assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"]) == len(found["prompt_logprobs"])
        assert all(
            str(token) in one
            for token, one in zip(found["prompt_token_ids"], found["prompt_logprobs"], strict=True)
            if one
        )
        parts = chunks(app, **fields)
        assert parts[0]["prompt_token_ids"] == found["prompt_token_ids"]
        told = [token for part in parts for one in part["choices"] for token in one.get("token_ids", ())]
        assert told == found["choices"][0]["token_ids"]


def test_prompts_are_scored(app: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        rows = pair.target(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    answer = ask(app, prompt=ids, prompt_logprobs=3, logprobs=1, echo=True, max_tokens=1)["choices"][0]
    told = answer["prompt_logprobs"]
    assert told[0] is None and len(told) == len(ids)
    for place, (token, one) in enumerate(zip(ids[1:], told[1:], strict=True)):
        row = rows[place]
        rank = int((row > row[token]).sum()) + 1
        assert one[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert one[str(token)]["rank"] == rank and len(one) == (3 if rank <= 3 else 4)
        assert one[str(token)]["decoded_token"] == pair.tokenizer.decode([token])
        best = next(token for token, score in one.items() if score["rank"] == 1)
        assert int(best) == int(row.argmax())
    assert all(len(top) == 1 for top in answer["logprobs"]["top_logprobs"][1:]), "echo tells as many as logprobs says"
    alone = ask(app, prompt=ids, prompt_logprobs=0, max_tokens=1)["choices"][0]
    assert all(len(one) == 1 for one in alone["prompt_logprobs"][1:])
    assert not alone["text"].startswith(PROMPT) and alone["logprobs"] is None


def test_what_cannot_be_told_is_refused(app: TestClient) -> None:
    status, said = error(app, prompt=PROMPT, prompt_logprobs=1, stream=True)
    assert status == 400 and "prompt_logprobs is not for streams" in said["message"]
    for wrong in (-1, 21, "3", True):
        status, said = error(app, prompt=PROMPT, prompt_logprobs=wrong)
        assert status == 400 and said["param"] == "prompt_logprobs", said
    status, said = error(app, prompt=PROMPT, return_token_ids=1)
    assert status == 400 and said["param"] == "return_token_ids"
    status, said = error(app, prompt=[[5] * 500] * 100, prompt_logprobs=20, max_tokens=1)
    assert status == 400 and said["param"] == "prompt_logprobs" and "1,050,000" in said["message"], said
