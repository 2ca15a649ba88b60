"""How a server behaves: keys, limits, queues, deadlines, clients that go away, draining, metrics, ids and logs."""

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from serving import PROMPT, ask, client, error, served, until

from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models import AdditivePenalties
from polydraft.server import Settings, build_app
from polydraft.server.worker import Ask, Event
from polydraft.server.worker.served import load_served
from polydraft.server.worker.writing import Writing

LONG = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}


def numbers(found: TestClient, prefix: str = "polydraft:") -> dict[str, float]:
    """Return the metrics by their names and labels, without the model's."""
    lines = [line for line in found.get("/metrics").text.splitlines() if line.startswith(prefix)]
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {
        name.replace('model_name="polydraft-embedded"', "").replace("{}", ""): float(value) for name, value in pairs
    }


def test_keys_limits_and_metrics_under_another_name() -> None:
    with client(
        keys=("right", "other"), max_body=2000, vllm_metrics=True, model_name="m", max_prompt_tokens=5
    ) as found:
        for key in ("", "wrong", "righ", "right2", "ü"):
            answer = found.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert found.get("/v1/models").status_code == 401 and found.get("/health").status_code == 200
        found.headers["authorization"] = "Bearer other"
        assert found.get("/v1/models").json()["data"][0]["id"] == "m"
        assert error(found, prompt="a" * 3000)[0] == 413
        parts = (b"x" * 500 for _ in range(8))
        assert found.post("/v1/completions", content=parts).status_code == 413
        status, told = error(found, prompt="a b c d e f g h")
        assert status == 400 and told["code"] == "context_length_exceeded"
        assert ask(found, prompt="a", seed=1)["model"] == "m"
        names = {name.split("{")[0] for name in numbers(found, "vllm:")}
        assert {"vllm:num_requests_running", "vllm:spec_decode_num_drafts_total"} <= names
        # `vllm bench serve` adds up all lines with these words, whatever follows them.
        assert {name for name in names if "num_drafts" in name} == {"vllm:spec_decode_num_drafts_total"}
        assert not [name for name in numbers(found) if "_created" in name]


def test_only_names_that_are_allowed_are_answered_to() -> None:
    with client(hosts=("own.example",)) as found:
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.1", "own.example:1"):
            assert found.get("/health", headers={"host": host}).status_code == 200, host
        for host in ("testserver", "evil.example", "localhost.evil.example", "127.0.0.1.evil", "", "[evil]", "evil:80"):
            answer = found.get("/health", headers={"host": host})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "wrong_host", host


def test_metrics_add_up(app: TestClient) -> None:
    before = numbers(app)
    answer = ask(app, seed=1, max_tokens=12, n=2)
    after = numbers(app)

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    told = answer["metrics"]["speculative_decoding"]
    assert grown("polydraft:generation_tokens_total") == 24
    assert grown("polydraft:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("polydraft:spec_decode_num_draft_tokens_total") == told["num_draft_tokens"]
    assert grown("polydraft:spec_decode_num_accepted_tokens_total") == told["num_accepted_draft_tokens"]
    assert grown('polydraft:request_success_total{finished_reason="length",}') == 2 or any(
        grown(name) == 2 for name in after if name.startswith("polydraft:request_success_total")
    )
    assert grown("polydraft:time_to_first_token_seconds_count") == 2
    until(lambda: numbers(app)["polydraft:num_requests_running"] == 0)


def told_to_benchmarks(text: str) -> dict[str, Any]:
    """Read counts of drafts as `vllm bench serve` does: it adds up lines by what stands somewhere in them."""
    counts: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "by_place": Counter()}
    for line in map(str.strip, text.split("\n")):
        if not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            counts["drafts"] += value
        elif "num_draft_tokens" in line:
            counts["draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            place = line.index('position="') + len('position="')
            counts["by_place"][int(line[place : line.index('"', place)])] += value
        elif "num_accepted_tokens" in line:
            counts["accepted"] += value
    return counts


def test_benchmarks_read_what_answers_say() -> None:
    with client(vllm_metrics=True) as found:
        asked = ({"temperature": 0}, {"speculative": {"drafter": "model", "tree": "3,2"}, "n": 2})
        for fields in asked:
            before = told_to_benchmarks(found.get("/metrics").text)
            told = ask(found, seed=1, max_tokens=20, **fields)["metrics"]["speculative_decoding"]
            after = told_to_benchmarks(found.get("/metrics").text)
            assert after["drafts"] - before["drafts"] == told["num_spec_steps"] > 0
            assert after["draft_tokens"] - before["draft_tokens"] == told["num_draft_tokens"] > 0
            places, counts = after["by_place"] - before["by_place"], told["acceptance_histogram"]
            assert places == Counter({place: sum(counts[place + 1 :]) for place in range(len(counts) - 1)}) + Counter()
            assert after["accepted"] - before["accepted"] == places.total() == told["num_accepted_draft_tokens"] > 0


def test_slots_and_steps_are_measured() -> None:
    with client(batch_size=2, max_length=200, vllm_metrics=True) as found:
        answer = ask(found, seed=1, max_tokens=20, n=2)
        own = numbers(found)
        steps, tokens = (own[f"polydraft:iteration_tokens_total_{kind}"] for kind in ("count", "sum"))
        assert tokens == 40 + 2 * answer["usage"]["prompt_tokens"]
        calls = answer["metrics"]["speculative_decoding"]["choices"]
        assert max(one["target_calls"] for one in calls) <= steps <= sum(one["target_calls"] for one in calls)
        assert own["polydraft:kv_cache_usage_perc"] == 0
        assert numbers(found, "vllm:")["vllm:kv_cache_usage_perc"] == 0
        seen = list[float]()
        desk: Any = found.app.state.desk  # pyright: ignore
        put = desk.metrics.put
        desk.metrics.put = lambda name, value: (put(name, value), name.startswith("kv_") and seen.append(value))
        asked = ask(found, seed=1, max_tokens=20)["usage"]
        assert seen[-1] == 0 and seen.count(asked["prompt_tokens"] / 400) == 1
        assert (asked["total_tokens"] - 20) / 400 <= max(seen) < asked["total_tokens"] / 400


def test_a_step_is_counted_before_anybody_has_an_answer() -> None:
    said = list[Event]()
    writing = Writing(load_served(Settings()), said.append)
    writing.take(Ask("a", ((5, 6),), n=2, seed=1, max_tokens=6))
    while not writing.idle:
        writing.step()
    kinds = [one.kind for one in said if one.kind in ("stepped", "gained")]
    assert kinds[0] == "stepped" and kinds[-1] == "gained"
    counted = sum(one.said["tokens"] for one in said if one.kind == "stepped")
    assert counted == 2 * 2 + 2 * 6


def test_a_request_has_an_id(app: TestClient) -> None:
    assert len(app.get("/health").headers["x-request-id"]) == 32
    answer = app.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "a\tb<c>1"})
    assert answer.headers["x-request-id"] == "abc1" and "abc1" in answer.json()["id"]


def test_logs_hold_no_prompts_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    for asked in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "polydraft.server"), client(prompts_logged=asked) as found:
            ask(found, prompt="secret words", seed=1)
        told = [getattr(record, "told", {}) for record in caplog.records if record.getMessage() == "request"]
        assert told[0]["completion_tokens"] == 8 and ("secret" in json.dumps(told)) is asked


def test_a_full_queue_says_when_to_try_again() -> None:
    with served(batch_size=1, max_queue=1) as address, httpx.Client(base_url=address, timeout=60) as found:
        with found.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
            lines = first.iter_lines()  # kept: whoever drops it closes the stream
            next(lines)
            with found.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
                answer = found.post("/v1/completions", json={"prompt": "a"})
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert found.post("/v1/completions", json={"prompt": "a", "n": 3}).json()["error"]["param"] == "n"
        until(lambda: 'num_requests_running{model_name="polydraft-embedded"} 0.0' in found.get("/metrics").text)
        assert found.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_client_that_goes_away_is_not_written_for() -> None:
    with served(batch_size=2) as address, httpx.Client(base_url=address) as found:
        with pytest.raises(httpx.ReadTimeout):
            found.post("/v1/completions", json=LONG, timeout=0.5)
        begun = time.monotonic()
        until(lambda: 'num_requests_running{model_name="polydraft-embedded"} 0.0' in found.get("/metrics").text)
        assert time.monotonic() - begun < 3


def test_a_deadline_ends_a_request() -> None:
    with client(deadline=0.4) as found:
        ask(found, max_tokens=1)
        begun = time.monotonic()
        status, told = error(found, **LONG)
        assert status == 504 and told["code"] == "deadline" and time.monotonic() - begun < 5
        answer = found.post("/v1/completions", json={**LONG, "stream": True})
        assert '"code":"deadline"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        assert ask(found, max_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_draining_lets_running_requests_end() -> None:
    with client(batch_size=2) as found:
        ask(found, max_tokens=1)
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(ask(found, **{**LONG, "max_tokens": 60})))
        thread.start()
        desk = found.app.state.desk  # pyright: ignore
        until(lambda: desk.outstanding == 1)
        found.portal.start_task_soon(desk.drain)  # pyright: ignore
        until(lambda: desk.stopping)
        status, told = error(found, prompt="a")
        assert status == 503 and told["code"] == "stopping" and found.get("/health").status_code == 503
        thread.join(30)
        assert answers[0]["usage"]["completion_tokens"] == 60


def test_other_pages_may_call_only_where_that_is_allowed(app: TestClient) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in app.options("/v1/models", headers=asked).headers
    with client(origins=("https://a.example",)) as found:
        answer = found.options("/v1/models", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_the_page_loads_nothing_from_elsewhere(app: TestClient) -> None:
    answer = app.get("/")
    assert answer.status_code == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    assert app.get("/page/index.html").headers["content-security-policy"] == answer.headers["content-security-policy"]
    assert app.get("/page/../app.py").status_code == 404 and app.get("/page/%2e%2e/app.py").status_code == 404
    told = app.get("/polydraft/options").json()
    words = [one["word"] for one in told["drafters"]]
    assert "model" in words and all(one["meaning"] for one in told["drafters"] + told["verifiers"])
    meanings = {one["word"]: one["meaning"] for one in told["drafters"] + told["verifiers"]}
    assert meanings["block"].endswith("whose trial succeeds, tried from its end")
    assert meanings["route-first"].startswith("A route between")
    assert told["defaults"]["drafter"] is None  # it depends on the temperature
    assert told["models"] == ["polydraft-embedded"] and told["chat"] is False and told["context"] == 1024


def test_a_model_that_cannot_be_served_is_said() -> None:
    app = build_app(Settings(target="/no/such/model", apart=False))

    async def run() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError

    with pytest.raises(PolydraftError, match="/no/such/model"):
        asyncio.run(run())
    with pytest.raises(InvalidParameter, match="batch_size"):
        Settings(batch_size=0)
    with pytest.raises(InvalidParameter, match="The draft 'pair-head' needs a target; that of the embedded pair is"):
        Settings(draft="pair-head")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": "9,9,9"}, "tree has more than 127 drafts"),
        ({"drafter": "ngram", "verifier": "spec-hub"}, "not spechub; pass a verifier"),
        ({"drafter": "model", "verifier": "block", "tree": "2,2"}, "Block verification verifies one draft per node"),
        ({"drafter": "ensemble"}, "needs a draft model"),
        ({"batch_size": 10**7}, "A batch of 10000000 texts .* would fit"),
    ],
    ids=str,
)
def test_options_that_no_text_could_be_written_with_are_said_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolydraftError, match=said) as found, client(**options):
        raise AssertionError
    assert str(found.value).count("\n") == 0


def test_a_tree_for_greedy_texts_alone_serves_these_and_is_told_to_others() -> None:
    with client(drafter="model", tree="eagle-2:10x6:25") as found:
        assert ask(found, temperature=0, max_tokens=4)["usage"]["completion_tokens"] == 4
        refused = found.post("/v1/completions", json={"prompt": "a", "temperature": 1, "max_tokens": 4})
        assert refused.status_code == 400


def no_more(*_: object) -> Any:
    raise OSError("no more")


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("fails", "status"),
    [(no_more, 500), (lambda history, scores: scores * 0 - torch.inf, 400), (lambda history, scores: "no", 400)],
    ids=["error", "no token is left", "no scores"],
)
@pytest.mark.parametrize("beside", [{}, {"presence_penalty": 0.5}, {"logit_bias": {"1": 1}, "guided_regex": "[a-z ]+"}])
def test_an_error_in_a_step_costs_the_text_whose_code_it_is(
    monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any], fails: Any, status: int
) -> None:
    usual = AdditivePenalties.__call__

    def penalised(self: AdditivePenalties, *given: Any) -> Any:
        return fails(*given) if self.presence == 1 else usual(self, *given)

    with client(batch_size=4) as found:
        ask(found, max_tokens=1)
        monkeypatch.setattr(AdditivePenalties, "__call__", penalised)
        answers: list[Any] = []
        fields = {**LONG, "max_tokens": 60, **beside}
        thread = threading.Thread(target=lambda: answers.append(ask(found, **fields)))
        thread.start()
        answer = found.post("/v1/completions", json={"prompt": PROMPT, "presence_penalty": 1, "seed": 1})
        thread.join(30)
        assert answer.status_code == status, answer.text
        assert answers[0]["usage"]["completion_tokens"] == 60
