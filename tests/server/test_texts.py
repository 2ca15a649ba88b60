"""What is written: streams and whole answers, seeds, choices, stop strings, log-probabilities, penalties, batches."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fastapi.testclient import TestClient
from serving import PROMPT, alone, ask, chunks, client, streamed

import polydraft
from polydraft.drafters import Followed, NgramDrafter, Session
from polydraft.drafters.text.guess import GivenDrafter
from polydraft.engine import as_drafter
from polydraft.errors import InvalidParameter
from polydraft.models import AdditivePenalties, HuggingFaceModel, Pair, TokenBias
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Ask, Spell
from polydraft.server.worker.served import LoadedModels
from polydraft.server.worker.working import Preparing
from polydraft.server.worker.writing import Writing

PROMPTS = (PROMPT, "import os\nclass A:\n", "for i in range(10):\n    print(", "x = [1, 2, 3]\n" * 6)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_seed_gives_the_text_of_the_single_run(app: TestClient, pair: Pair, heat: float) -> None:
    answer = ask(app, seed=5, temperature=heat, max_tokens=12)
    assert answer["choices"][0]["text"] == alone(pair, PROMPT, seed=5, temperature=heat, max_new_tokens=12)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12 and answer["polydraft"]["seeds"] == [5]


@pytest.mark.long(2)
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"n": 2}, {"stop": ["\n        r"]}])
def test_a_stream_is_the_whole_in_pieces(app: TestClient, more: dict) -> None:
    fields = {"seed": 3, "temperature": 0.8, "max_tokens": 12, **more}
    whole, pieces = ask(app, **fields), chunks(app, **fields, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        assert streamed(pieces, choice["index"]) == choice["text"]
        own = [one for chunk in pieces for one in chunk["choices"] if one["index"] == choice["index"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(one["finish_reason"] is None for one in own[:-1])
        if "logprobs" in more:
            told = [value for one in own for value in one["logprobs"]["token_logprobs"]]
            assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"] == whole["usage"]
    assert pieces[-1]["metrics"] == whole["metrics"] and sum("metrics" in piece for piece in pieces) == 1


def test_choices_have_seeds_that_follow_from_the_first(app: TestClient, pair: Pair) -> None:
    answer = ask(app, prompt=list(PROMPTS[:2]), n=2, seed=7)
    seeds = [7 + 1_000_003 * number for number in range(4)]
    assert answer["polydraft"]["seeds"] == seeds
    texts = [alone(pair, PROMPTS[number // 2], seed=seed, temperature=1.0) for number, seed in enumerate(seeds)]
    assert [choice["text"] for choice in answer["choices"]] == texts


def test_texts_beside_others_are_what_they_are_alone(app: TestClient, pair: Pair) -> None:
    fields = [
        {
            "prompt": PROMPTS[number % 4],
            "seed": number,
            "temperature": (0.0, 0.7, 1.0)[number % 3],
            "max_tokens": 3 + 5 * (number % 4),
            "speculative": {"drafter": ("model", "ngram", "none", "merge")[number % 4]},
        }
        for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda own: ask(app, **own), fields))
    for own, answer in zip(fields, answers, strict=True):
        word = own["speculative"]["drafter"]
        text = alone(
            pair,
            own["prompt"],
            seed=own["seed"],
            temperature=own["temperature"],
            max_new_tokens=own["max_tokens"],
            drafter=pair.draft if word == "model" else word,
        )
        assert answer["choices"][0]["text"] == text


@pytest.mark.long(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_never_shown(app: TestClient, stream: bool) -> None:
    text = ask(app, seed=2, temperature=0, max_tokens=24)["choices"][0]["text"]
    for stop in {text[place : place + 3] for place in range(4, len(text) - 3, 13)}:
        fields = {"seed": 2, "temperature": 0, "max_tokens": 24, "stop": stop}
        found = streamed(chunks(app, **fields)) if stream else ask(app, **fields)["choices"][0]["text"]
        assert found == text[: text.index(stop)]


def test_stop_strings_can_be_kept_and_tokens_can_stop(app: TestClient) -> None:
    usual = {"seed": 2, "temperature": 0, "max_tokens": 24}
    text = ask(app, **usual)["choices"][0]["text"]
    stop = text[5:8]
    kept = ask(app, **usual, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: text.index(stop) + 3]
    assert kept["finish_reason"] == "stop" and kept["stop_reason"] == stop
    pieces = chunks(app, **usual, logprobs=0)
    token = app.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"][3]
    stopped = ask(app, **usual, stop_token_ids=[token])["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == token
    assert text.startswith(stopped["text"]) and len(pieces) > 1


@pytest.mark.long(1)
@pytest.mark.parametrize("drafter", ["none", "model", "merge"])
def test_nothing_ends_a_text_before_it_has_so_many_tokens(app: TestClient, pair: Pair, drafter: str) -> None:
    fields = {"temperature": 0, "max_tokens": 24, "speculative": {"drafter": drafter}}
    text = ask(app, **fields)["choices"][0]["text"]
    tokens = app.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    ends = [tokens[2], 0]
    stopped = ask(app, **fields, stop_token_ids=ends, min_tokens=10, logprobs=0)["choices"][0]
    ids, new = pair.tokenizer(PROMPT, return_tensors="pt").input_ids, []
    while len(new) < 24 and (len(new) < 11 or new[-1] not in ends):  # greedy decoding by hand
        with torch.no_grad():
            scores = pair.target(ids).logits[0, -1].double()
        scores[ends] -= torch.inf if len(new) < 10 else 0
        new.append(int(scores.argmax()))
        ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=-1)
    shown = new[:-1] if new[-1] in ends else new
    assert pair.tokenizer.decode(shown, clean_up_tokenization_spaces=False) == stopped["text"]
    assert len(stopped["logprobs"]["tokens"]) == len(new) > 10


AGAIN = pytest.mark.slow
"""Rows that repeat others, for the slow suite."""


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("stream", "others", "waits"),
    [
        (False, ("            and more",), (0, 7)),
        (True, ("never said",), (4, 16)),
        pytest.param(False, (), (0, 4, 7, 16), marks=AGAIN),
        pytest.param(False, ("never said",), (0, 4, 7, 16), marks=AGAIN),
        pytest.param(True, (), (0, 4, 7, 16), marks=AGAIN),
        pytest.param(True, ("            and more",), (0, 4, 7, 16), marks=AGAIN),
    ],
)
def test_a_stop_string_counts_only_behind_so_many_tokens(
    app: TestClient, stream: bool, others: tuple[str, ...], waits: tuple[int, ...]
) -> None:
    fields = {"temperature": 0, "max_tokens": 16, "logprobs": 0}
    usual = ask(app, **fields)["choices"][0]
    text, parts = usual["text"], usual["logprobs"]["tokens"]
    for least in waits:
        before = len("".join(parts[:least]))
        for stop in {text[place : place + 2] for place in range(2, len(text) - 2, 11)}:
            more = {**fields, "stop": [stop, *others], "min_tokens": least}
            found = streamed(chunks(app, **more)) if stream else ask(app, **more)["choices"][0]["text"]
            place = text.find(stop, max(0, before + 1 - len(stop)))
            assert found == (text if place < 0 else text[:place]), (stop, least)


def test_a_stop_string_that_only_the_end_completes_is_one(app: TestClient, pair: Pair) -> None:
    """Bytes of no character are held back until there can be no more of them."""
    half = pair.tokenizer("\u20ac", add_special_tokens=False)["input_ids"][0]
    assert pair.tokenizer.decode([half]) == "\ufffd"
    fields = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(half): 100}}
    assert ask(app, **fields)["choices"][0]["text"] == "\ufffd" * 3
    for stop, text in (("\ufffd\ufffd\ufffd", ""), ("\ufffd", "")):
        choice = ask(app, **fields, stop=stop)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)


def test_log_probabilities_are_the_models_own(app: TestClient, pair: Pair) -> None:
    answer = ask(app, seed=1, max_tokens=5, logprobs=3, echo=True)
    told = answer["choices"][0]["logprobs"]
    prompt = pair.tokenizer(PROMPT)["input_ids"]
    ids = [*prompt, *pair.tokenizer(answer["choices"][0]["text"][len(PROMPT) :], add_special_tokens=False)["input_ids"]]
    assert told["token_logprobs"][0] is None and len(told["tokens"]) == len(prompt) + 5
    with torch.inference_mode():
        rows = pair.target(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    if len(ids) == len(told["tokens"]):  # the tokenizer may cut the text otherwise than the model wrote it
        own = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
        assert told["token_logprobs"][1:] == pytest.approx(own, abs=1e-3)
    assert told["text_offset"][1] == len(told["tokens"][0])
    assert all(len(one) <= 3 for one in told["top_logprobs"][1:])


def test_echo_alone_writes_nothing(app: TestClient) -> None:
    answer = ask(app, max_tokens=0, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0


def test_penalties_are_those_of_the_interface(app: TestClient, pair: Pair) -> None:
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"14": 3.0, "5": -100}}
    answer = ask(app, seed=4, temperature=0, max_tokens=16, **fields)
    length = len(pair.tokenizer(PROMPT)["input_ids"])
    processors = [TokenBias({14: 3.0, 5: -100}, 8192), AdditivePenalties(length, 1.5, 0.5)]
    text = alone(pair, PROMPT, seed=4, temperature=0, max_new_tokens=16, logits_processor=processors)
    assert answer["choices"][0]["text"] == text
    ids, new = pair.tokenizer(PROMPT, return_tensors="pt").input_ids, []
    for _ in range(16):  # greedy decoding by hand
        with torch.no_grad():
            scores = pair.target(ids).logits[0, -1].double()
        scores[14] += 3.0
        scores[5] -= 100.0
        for token in set(new):
            scores[token] -= 1.5 + 0.5 * new.count(token)
        new.append(int(scores.argmax()))
        ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=-1)
    assert pair.tokenizer.decode(new, clean_up_tokenization_spaces=False) == text


def test_what_a_request_wants_of_drafts_is_done(app: TestClient) -> None:
    plain = ask(app, seed=1, temperature=0, speculative={"enabled": False})
    told = plain["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] == 0 and told["tokens_per_call"] == 1.0
    drafted = ask(app, seed=1, temperature=0, n=2, speculative={"drafter": "model", "tree": "3,2"})
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    told = drafted["metrics"]["speculative_decoding"]
    assert len(told["choices"]) == 2 and told["num_draft_tokens"] == 9 * told["num_spec_steps"]
    assert told["num_accepted_draft_tokens"] == sum(one["num_accepted_draft_tokens"] for one in told["choices"])
    short = ask(app, seed=1, temperature=0, speculative={"drafter": "model", "max_draft_tokens": 2})
    told = short["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] <= 2 * told["num_spec_steps"]


def test_counts_of_drafts_have_the_shape_that_benchmarks_read(app: TestClient) -> None:
    for asked in ({"enabled": False}, {"drafter": "model", "tree": "3,2"}, {"drafter": "model", "tree": "chain:4"}):
        for n in (1, 2):
            told = ask(app, seed=2, max_tokens=14, n=n, speculative=asked)["metrics"]["speculative_decoding"]
            steps, counts = told["num_spec_steps"], told["acceptance_histogram"]
            assert type(told["num_spec_tokens"]) is int and len(counts) == told["num_spec_tokens"] + 1
            assert all(type(count) is int for count in counts) and sum(counts) == steps
            assert sum(place * count for place, count in enumerate(counts)) == told["num_accepted_draft_tokens"]
            assert told["mean_acceptance_length"] == pytest.approx(
                1 + told["num_accepted_draft_tokens"] / max(1, steps), abs=1e-4
            )
            assert told["num_spec_tokens"] == {"3,2": 2, "chain:4": 4}.get(asked.get("tree"), 0)


@pytest.mark.parametrize("n", [1, 2])
def test_the_drafts_of_every_step_are_told_where_that_is_asked_for(app: TestClient, n: int) -> None:
    fields = {"seed": 2, "max_tokens": 16, "n": n}
    plain = ask(app, **fields)["metrics"]["speculative_decoding"]
    found = ask(app, **fields, speculative={"detailed": True})["metrics"]["speculative_decoding"]
    for told in (found, *found.get("choices", ())):
        accepted, drafted = told.pop("per_step_accepted"), told.pop("per_step_drafted")
        assert len(accepted) == len(drafted) == told["num_spec_steps"] > 0 and min(drafted) > 0
        assert (sum(accepted), sum(drafted)) == (told["num_accepted_draft_tokens"], told["num_draft_tokens"])
        assert [accepted.count(size) for size in range(told["num_spec_tokens"] + 1)] == told["acceptance_histogram"]
    assert found == plain
    if n == 1:
        parts = chunks(app, **fields, speculative={"detailed": True, "trace": True})
        steps = [part["polydraft"] for part in parts if any(part["polydraft"]["tree"]["valid"][1:])]
        accepted = [sum(token["origin"] != "target" for token in one["tokens"]) for one in steps]
        assert parts[-1]["metrics"]["speculative_decoding"]["per_step_accepted"] == accepted


@pytest.mark.slow
def test_an_operator_says_how_much_is_told_of_drafts() -> None:
    def keys(level: str, **speculative: bool) -> list[bool | None]:
        with client(draft_metrics=level) as found:
            body = {"seed": 1, "max_tokens": 3, "speculative": speculative}
            whole, last = ask(found, **body)["metrics"], chunks(found, **body)[-1]["metrics"]
        return [one and "per_step_drafted" in one["speculative_decoding"] for one in (whole, last)]

    assert keys("none") == keys("none", detailed=False) == [None, None]
    assert keys("none", detailed=True) == keys("detailed") == [True, True]
    assert keys("detailed", detailed=False) == keys("summary") == [False, False]
    with pytest.raises(InvalidParameter, match="draft_metrics must be one of none, summary, detailed"):
        Settings(draft_metrics="all")


def test_a_trace_shows_the_tree_and_who_wrote_what(app: TestClient) -> None:
    pieces = chunks(app, seed=3, max_tokens=12, speculative={"trace": True, "tree": "2,2"})
    told = [chunk["polydraft"] for chunk in pieces]
    assert [one["step"] for one in told] == list(range(1, len(told) + 1))
    assert "".join(token["text"] for one in told for token in one["tokens"]) == streamed(pieces)
    for one in told:
        tree, drafted = one["tree"], [token for token in one["tokens"] if token["origin"] != "target"]
        assert len(tree["ids"]) == len(tree["parents"]) == len(tree["valid"]) == 7 and tree["parents"][0] == -1
        assert [tree["ids"][node] for node in tree["accepted"]][: len(drafted)] == [token["id"] for token in drafted]
    assert told[-1]["accepted"] == pieces[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert json.dumps(told)


def test_a_prediction_is_drafted_and_counted(app: TestClient, pair: Pair) -> None:
    text = alone(pair, PROMPT, temperature=0, max_new_tokens=24)
    other = text.replace("function.", "function/")
    for predicted, accepted, rejected, drafts in (
        (text, 24, 0, 23),  # the last token was the target's own
        (other, 23, 1, 20),
        ("zzzz qqqq wwww", 0, 7, 0),
    ):
        for n in (1, 2):
            body = {"temperature": 0, "max_tokens": 24, "n": n}
            body["prediction"] = {"type": "content", "content": predicted}
            answer, parts = ask(app, **body), chunks(app, **body, stream_options={"include_usage": True})
            assert [one["text"] for one in answer["choices"]] == [text] * n
            usage = answer["usage"]["completion_tokens_details"]
            predictions = {"accepted_prediction_tokens": n * accepted, "rejected_prediction_tokens": n * rejected}
            assert usage == {**predictions, "reasoning_tokens": 0}
            assert parts[-1]["usage"]["completion_tokens_details"] == usage
            told = answer["metrics"]["speculative_decoding"]["sources"]["prediction"]
            assert told["accepted"] == n * drafts <= n * accepted
            ids = pair.tokenizer(PROMPT, return_tensors="pt").input_ids
            run = polydraft.generate(
                pair.target,
                ids,
                drafter=pair.draft,
                temperature=0,
                max_new_tokens=24,
                prediction=predicted,
                tokenizer=pair.tokenizer,
            )
            found = Followed(pair.tokenizer(predicted, add_special_tokens=False)["input_ids"])
            assert found.on(run.sequences[0, ids.shape[1] :].tolist()).accepted == accepted
            assert run.statistics.sources["prediction"][1] == drafts


def test_harmless_fields_are_dropped_and_nulls_are_nothing(app: TestClient) -> None:
    answer = ask(app, user="u", store=True, metadata={"a": 1}, seed=None, stop=None, temperature=None, logit_bias=None)
    assert len(answer["polydraft"]["seeds"]) == 1


def test_tokens_go_in_and_out(app: TestClient) -> None:
    told = app.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert "".join(told["token_strs"]) == PROMPT and told["count"] == len(told["tokens"])
    assert app.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": PROMPT}
    whole, own = ask(app, seed=1), ask(app, seed=1, prompt=told["tokens"])
    assert whole["choices"] == own["choices"]


@pytest.mark.long(1)
@pytest.mark.parametrize("plan", ["auto", "goodput"])
def test_a_planner_chooses_the_trees_of_requests_without_a_seed(pair: Pair, plan: str) -> None:
    greedy = alone(pair, PROMPT, temperature=0, max_new_tokens=12)
    with client(plan=plan, batch_size=3) as app, ThreadPoolExecutor(6) as pool:
        seeded = {"seed": 5, "temperature": 1.0, "max_tokens": 12}
        fields = [{"temperature": 0, "max_tokens": 12}, seeded, {"n": 2, "max_tokens": 20}] * 2
        answers = list(pool.map(lambda own: ask(app, **own), fields))
    assert [answers[place]["choices"][0]["text"] for place in (0, 3)] == [greedy] * 2
    assert answers[1]["choices"] == answers[4]["choices"]
    assert answers[1]["choices"][0]["text"] == alone(pair, PROMPT, seed=5, temperature=1.0, max_new_tokens=12)


def test_greedy_and_sampled_texts_have_planners_of_their_own(pair: Pair) -> None:
    served, events = (
        LoadedModels(Settings(plan="auto"), HuggingFaceModel(pair.target), pair.tokenizer, as_drafter(pair.draft)),
        [],
    )
    writing = Writing(served, events.append)
    greedy, sampled = (writing._planned[kind] for kind in (True, False))
    assert greedy.drafter.name.endswith(", else model)") and sampled.drafter.name == "model"
    for heat, own, other in ((0.0, greedy, sampled), (0.8, sampled, greedy), (0.3, sampled, greedy)):
        before = own.policy.steps, other.policy.steps
        options = {"do_sample": heat > 0} | ({"temperature": heat} if heat else {})
        writing.take(Ask(f"{heat}", (PROMPT,), options=options, max_tokens=12))
        while not writing.idle:
            writing.step()
        assert own.policy.steps > before[0] and other.policy.steps == before[1]
    assert not [one for one in events if one.kind in ("refused", "failed")]


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "own"}])
def test_the_choices_of_a_request_read_their_prompt_once(app: TestClient, pair: Pair, salt: dict[str, str]) -> None:
    prompt = f"choices = {salt or 'all'}\nfor one in choices:\n    print(one, len(choices))\n" * 2

    def counted(name: str) -> int:
        line = next(one for one in app.get("/metrics").text.splitlines() if one.startswith(f"polydraft:{name}_total"))
        return int(float(line.split()[-1]))

    before = counted("prefix_cache_queries"), counted("prefix_cache_hits")
    answer = ask(app, prompt=prompt, n=3, seed=5, max_tokens=6, **salt)
    count = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert counted("prefix_cache_queries") - before[0] == 3 * count
    assert counted("prefix_cache_hits") - before[1] == 2 * (count - 1)
    texts = [alone(pair, prompt, seed=seed, temperature=1.0, max_new_tokens=6) for seed in answer["polydraft"]["seeds"]]
    assert [one["text"] for one in answer["choices"]] == texts


def test_what_joining_takes_is_no_time_of_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: NgramDrafter, text: object, session: Session) -> object:
        time.sleep(0.2)
        return GivenDrafter.start(self, text, session)

    monkeypatch.setattr(NgramDrafter, "start", start)
    served = LoadedModels(Settings(plan="auto"), HuggingFaceModel(pair.target), pair.tokenizer, as_drafter(pair.draft))
    writing = Writing(served, lambda event: None)
    planner, rests = writing._planned[True].policy, list[float]()
    learn = planner.learn
    planner.learn = lambda lessons, spent, scored: (rests.append(spent.rest), learn(lessons, spent, scored))
    for number in range(3):
        writing.take(Ask(f"{number}", (PROMPT,), options={"do_sample": False}, max_tokens=6, ignore_eos=True))
        writing.step()
    while not writing.idle:
        writing.step()
    assert rests and min(rests) > 0 and max(rests) < 0.2


def test_planners_are_told_of_as_many_rows_as_the_step_has(pair: Pair) -> None:
    """A prompt that is still being read is no row, and a new text is told of though as many rows go on."""
    settings = Settings(plan="auto", batch_size=3, chunk=16)
    writing = Writing(
        LoadedModels(settings, HuggingFaceModel(pair.target), pair.tokenizer, as_drafter(pair.draft)), print
    )
    planner = writing._planned[True].policy
    told, noted = [], []
    texts_opened, learn = planner.texts_opened, planner.learn
    planner.texts_opened = lambda opening: (told.append(opening), texts_opened(opening))
    planner.learn = lambda lessons, spent, scored: (
        noted.append((planner.timed.rows, len(lessons), scored)),
        learn(lessons, spent, scored),
    )
    for number, words in enumerate((2, 90, 4, 3)):
        writing.take(Ask(f"{number}", ("word " * words,), options={"do_sample": False}, max_tokens=12, ignore_eos=True))
    while not writing.idle:
        writing.step()
    assert noted and all(0 < lessons <= rows <= scored for rows, lessons, scored in noted)
    # nothing is drafted where one token is left to a text: a step of each at most
    assert sum(rows - lessons for rows, lessons, _ in noted) <= 4
    counts = {rows for rows, _, _ in noted}
    assert counts >= {1, 2} and told[0].others == 0 and told[-1].rows <= max(counts)
    assert any(one.others and one.length for one in told), "one joined those in progress"
    assert any(one.soon > one.rows for one in told), "a prompt is being read, and soon there is one more"


def test_no_process_that_ends_waits_for_a_prompt_in_preparation(pair: Pair) -> None:
    """Python waits for all threads that are no daemons, those of a pool too."""
    before = {*threading.enumerate()}
    preparing = Preparing(
        LoadedModels(Settings(), HuggingFaceModel(pair.target), pair.tokenizer, as_drafter(pair.draft))
    )
    preparing.take(Spell("a", "one two"))
    preparing.take(Spell("b", "three"))
    names = list[str]()
    while preparing.busy:
        preparing.wait(1)
        names += [told.name for told, found in preparing.done() if found.result()["tokens"]]
    started = {*threading.enumerate()} - before
    assert names == ["a", "b"] and started and all(one.daemon for one in started)
    preparing.end()
    for one in started:
        one.join(10)
