"""A server whose draft learns: versions in answers, pins, opting out, what is kept of texts, and who may write."""

import itertools
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from serving import PROMPT, ask, chunks, client, error, until

import polydraft
from polydraft.engine import as_drafter, load
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models import load_pair
from polydraft.models.checkpoints.weight_versions import VersionFolder, weights_of
from polydraft.options.commands.serve_options import folder_of_versions
from polydraft.server import Settings, build_app
from polydraft.server.front import learners
from polydraft.server.front.learners import LearnerPlace
from polydraft.server.front.metrics import Metrics, Timing
from polydraft.server.front.tickets import Attempt, Ticket
from polydraft.server.worker import learning
from polydraft.server.worker.asks import Ask, Event, Speculation, Stop
from polydraft.server.worker.teaching import Teaching
from polydraft.training.online.lesson_buffer import LessonBuffer, TaughtText
from polydraft.training.online.online_learning import LearningPlan, OnlineLearner
from polydraft.training.online.taught_drafts import module_to_learn

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
CANARY = "canary_87x = 'zq'"
SHIPPED = Path(polydraft.__file__).parent / "data" / "pair"
SOON = LearningPlan(texts=8, steps=8, least=16, held_texts=12, held_tokens=100, most_bytes=64 << 20)
"""A look comes within seconds."""


@contextmanager
def learning_client(folder: Path, **settings: Any) -> Iterator[TestClient]:
    with client(learn=str(folder), batch_size=4, **settings) as found:
        yield found


def add_version(folder: Path, seed: int, look: int) -> str:
    """Write a version of the embedded draft, as a learner would, and let it be used."""
    stream, own = torch.Generator().manual_seed(seed), weights_of(load_pair().draft)
    new = {name: value + 0.02 * torch.randn(value.shape, generator=stream) for name, value in own.items()}
    found = VersionFolder(folder)
    version = found.add(new, {"look": look})
    assert found.use(version.name, look, found.mark())
    found.prune()
    return f"{version.name}.{look}"


def told(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["choices"][0]["text"], answer["polydraft"]["version"]


def metric(found: TestClient, name: str) -> float:
    lines = found.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"polydraft:{name}")).split()[-1])


def test_a_pinned_version_and_a_seed_give_the_same_text_after_swaps_and_a_restart(tmp_path: Path) -> None:
    with learning_client(tmp_path) as found:
        first = told(ask(found, **SAMPLED))
        assert first[1].startswith("0-") and first[1].endswith(".0")
        names = [first[1]]
        texts = {first[1]: first[0]}
        for number in range(1, 6):
            names.append(add_version(tmp_path, number, number))
            text, version = told(ask(found, **SAMPLED))
            assert version == names[-1]
            texts[version] = text
        assert len({*texts.values()}) > 3, "each version has numbers of its own"
        kept = [names[0], *names[-3:]]
        for name in kept:
            assert told(ask(found, **SAMPLED, speculative={"version": name})) == (texts[name], name)
        last = chunks(found, **SAMPLED, speculative={"version": kept[1]})[-1]
        assert last["polydraft"]["version"] == kept[1]
    with learning_client(tmp_path) as found:
        for name in reversed(kept):
            assert told(ask(found, **SAMPLED, speculative={"version": name})) == (texts[name], name)
        assert told(ask(found, **SAMPLED))[1] == names[-1]
        for wrong in (names[1], "7-00000000.1", "x", f"{names[-1]}9"):
            status, said = error(found, prompt=PROMPT, speculative={"version": wrong})
            assert (status, said["param"], said["code"]) == (404, "speculative.version", "unknown_version")
            assert said["message"].endswith(f"the newest one is {names[-1]}.") and wrong in said["message"]
        folder = VersionFolder(tmp_path)
        folder.pin("0")
        assert told(ask(found, **SAMPLED))[1].startswith("0-")
        folder.forget()
        assert told(ask(found, **SAMPLED)) == first, "as if nothing had ever been learnt"
        assert ask(found, speculative={"enabled": False})["polydraft"].get("version") is None


def test_a_head_has_versions_and_its_lessons_have_the_states_that_it_reads(tmp_path: Path) -> None:
    """The shipped head of the embedded target reads three layers beside the last one."""
    pair = load("pair", "pair-head")
    module = module_to_learn(as_drafter(pair.draft), pair.target)
    stream, own = torch.Generator().manual_seed(3), weights_of(module)
    new = {name: value + 0.02 * torch.randn(value.shape, generator=stream) for name, value in own.items()}
    with learning_client(tmp_path, target="pair", draft="pair-head") as found:
        first, before = ask(found, **SAMPLED), told(ask(found, **SAMPLED))
        assert before[1].startswith("0-") and before == told(first)
        until(lambda: metric(found, "learn_texts_total") >= 2, 60)
        count = sum(first["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
        until(lambda: metric(found, "learn_bytes") > 0, 60)
        assert metric(found, "learn_bytes") == 2 * count * (8 + 2 * 4 * 256)
        folder = VersionFolder(tmp_path)
        version = folder.add(new, {"look": 1})
        assert folder.use(version.name, 1, folder.mark())
        after = told(ask(found, **SAMPLED))
        assert after[1] == f"{version.name}.1"
        assert told(ask(found, **SAMPLED, speculative={"version": before[1]})) == before
        assert told(ask(found, **SAMPLED)) == after


def test_a_version_is_told_however_many_others_were_asked_for(tmp_path: Path) -> None:
    """Also of those that were refused, for which weights are loaded and no method is made."""
    with learning_client(tmp_path) as found:
        names = [add_version(tmp_path, number, number) for number in (1, 2, 3)]
        first = told(ask(found, **SAMPLED, speculative={"version": names[0]}))
        for name in names[1:]:
            assert error(found, prompt="a" * 99, max_tokens=10**5, speculative={"version": name})[0] == 400
        assert told(ask(found, **SAMPLED, speculative={"version": names[0]})) == first


@pytest.mark.parametrize("drafts", [{"drafter": "ngram"}, {"enabled": False}, {"max_draft_tokens": 0}])
def test_a_version_where_no_learnt_weights_draft_is_refused(drafts: dict[str, Any], tmp_path: Path) -> None:
    with learning_client(tmp_path) as found:
        _, version = told(ask(found))
        assert "version" not in ask(found, speculative=drafts)["polydraft"]
        status, said = error(found, prompt=PROMPT, speculative={**drafts, "version": version})
        assert (status, said["param"]) == (400, "speculative.version")
        assert said["message"] == f"version is {version!r}, but no learnt weights draft this text; leave version out."


def test_a_text_whose_worker_and_version_are_gone_goes_on_from_what_was_told() -> None:
    """By the law, with the version in use; a request that names a version that there is not is refused."""
    ask = Ask("a", ("x",), seed=5, speculation=Speculation(version="3-0000000a.7"))
    first = Attempt(ask, Ticket(ask, Timing(Metrics("m")), 0.0))
    ticket, refused = first.ticket, {"message": "", "param": "speculative.version", "code": "unknown_version"}
    assert ticket.news(first, Event("refused", "a", refused)) == Event("refused", "a", refused)
    ticket.news(first, Event("begun", "a", {"seeds": [5], "version": "3-0000000a.7"}))
    ticket.news(first, Event("joined", "a", {"number": 0, "prompt": 1}))
    ticket.news(first, Event("gained", "a", {"number": 0, "tokens": [7, 8], "finish": ""}))
    (again,) = first.restarts()
    assert isinstance(again.ask, Ask) and again.ask.speculation.version and not again.ask.told
    onward = ticket.news(again, Event("refused", again.ask.name, refused))
    assert isinstance(onward, Attempt) and isinstance(onward.ask, Ask) and onward.number == 0
    assert onward.ask.told == (7, 8) and onward.ask.seed != 5 and onward.ask.speculation.version is None
    begun = Event("gained", onward.ask.name, {"number": 0, "tokens": [9], "finish": "eos"})
    told = ticket.news(onward, begun)
    assert isinstance(told, Event) and told.said["resumed"] == {"index": 0, "tokens": 2, "seed": onward.ask.seed}


def test_what_is_damaged_is_not_served(tmp_path: Path) -> None:
    older = add_version(tmp_path, 1, 1)
    newer = add_version(tmp_path, 2, 2)
    path = tmp_path / "versions" / newer.partition(".")[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged; an older one drafts"), learning_client(tmp_path) as found:
        assert told(ask(found, **SAMPLED))[1] == f"{older.partition('.')[0]}.2"


def test_finished_texts_are_told_and_those_that_opt_out_are_not(tmp_path: Path) -> None:
    keys = {"keys": ("mine", "other"), "unlearnt_keys": ("other",)}
    with learning_client(tmp_path, **keys) as found:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))

        def post(headers: dict[str, str], **fields: Any) -> None:
            body = {"prompt": PROMPT, "max_tokens": 4, **fields}
            assert found.post("/v1/completions", json=body, headers=headers).status_code == 200

        for fields in (
            {"learn": False},
            {"cache_salt": "a"},
            {"repetition_penalty": 1.2},
            {"logit_bias": {"5": 1.0}},
            {"min_tokens": 2},
            {"presence_penalty": 0.5},
            {"response_format": {"type": "regex", "regex": "[ab]+"}},
            {"temperature": 1.0, "speculative": {"verifier": "typical"}},
        ):
            post(mine, **fields)
        post(other)
        post(mine)
        post(mine, learn=True, temperature=0.7, top_p=0.9, n=2)
        until(lambda: metric(found, "learn_texts_total") >= 3, 60)
        time.sleep(0.2)
        assert metric(found, "learn_texts_total") == 3 and metric(found, "learn_bytes") > 0
        assert "learner" in [one.name for one in threading.enumerate()]
        assert metric(found, "learn_version") == metric(found, "learn_look") == 0
        VersionFolder(tmp_path).forget()
        until(lambda: not metric(found, "learn_bytes"), 60)
        post(mine)
        until(lambda: metric(found, "learn_bytes") > 0, 60)  # what is asked for behind it is learnt from again


def worsened(kind: str, folder: Path, noise: float) -> str:
    """Write the shipped draft or head with noise on its weights, so that learning pays at once."""
    shutil.copytree(SHIPPED / kind, folder)
    stream, path = torch.Generator().manual_seed(4), folder / "model.safetensors"
    own = load_file(path)
    for one in (one for one in own.values() if one.ndim > 1 and one.is_floating_point()):
        one += noise * one.std() * torch.randn(one.shape, generator=stream).to(one.dtype)
    save_file(own, path, {"format": "pt"})
    return str(folder)


def canary_prompts(learnt: int, held_out: int) -> list[str]:
    """Return prompts with the canary in them, so many of which are for learning, and so many for choosing."""
    tokenizer, found, left = load_pair().tokenizer, list[str](), [learnt, held_out]
    for number in itertools.count():
        prompt = f"{CANARY}\nx{number} ="
        ids = tuple(tokenizer(prompt).input_ids)
        held = TaughtText(ids, len(ids), 1.0, torch.zeros(0)).is_held_out
        if left[held]:
            left[held] -= 1
            found.append(prompt)
        if not any(left):
            return found
    raise AssertionError


def check_canary(folder: Path, said: str) -> None:
    """Check that the canary is in no file of a folder and in nothing that was said: not its text, nor its tokens."""
    tokenizer = load_pair().tokenizer
    ids, whole = tokenizer(CANARY, add_special_tokens=False).input_ids, tokenizer(canary_prompts(1, 0)[0]).input_ids
    assert len(ids) > 3 and repr(ids)[1:-1] in repr(whole), "prompts hold these tokens"
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    spelt = [torch.tensor(ids, dtype=kind).numpy().tobytes() for kind in (torch.int16, torch.int32, torch.int64)]
    written = [CANARY, repr(ids)[1:-1], ",".join(map(str, ids)), " ".join(map(str, ids))]
    assert len(kept) > 1000 and not any(one in said for one in written)
    assert not any(one in kept for one in [*spelt, *(one.encode() for one in written)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "noise", "rate"), [("draft", 0.5, 2e-3), ("head", 0.3, 5e-4)])
def test_a_learner_in_its_own_process_swaps_by_its_own_looks_and_may_be_killed(
    kind: str,
    noise: float,
    rate: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All of its texts have a canary in them, which is in no file, log or metric."""
    monkeypatch.setattr(learners, "run_learner", partial(learning.run_learner, plan=replace(SOON, rate=rate)))
    folder, prompts = tmp_path / "learnt", canary_prompts(24, 16)
    draft = worsened(kind, tmp_path / "draft", noise)
    greedy = {"prompt": prompts[:4], "temperature": 0.0, "max_tokens": 24, "learn": False}
    app = build_app(Settings(target="pair", draft=draft, learn=str(folder), threads=1))
    with caplog.at_level(logging.DEBUG), TestClient(app) as found:
        place = app.state.desk.learner

        def soon(true: Callable[[], bool]) -> None:
            """Wait, with a learner that is as fast as others, where that may be: beside other work it stands still."""

            def found_so() -> bool:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, place.pid or 0, os.getpriority(os.PRIO_PROCESS, 0))
                return true()

            until(found_so, 500)

        written, first = [one["text"] for one in ask(found, **greedy)["choices"]], told(ask(found, **SAMPLED))
        assert first[1].startswith("0-") and first[1].endswith(".0")
        ask(found, prompt=prompts, temperature=1.0, seed=1, max_tokens=24)
        soon(lambda: metric(found, "learn_swaps_total") >= 1)
        versions = VersionFolder(folder)
        versions.pin(versions.in_use().version)  # from here on the learner rests, so that the version stays
        text, version = told(ask(found, **SAMPLED))
        own = versions.in_use()
        assert version == f"{own.version}.{own.look}" and versions.version(own.version).facts["saving"] > 0.01
        assert told(ask(found, **SAMPLED, speculative={"version": version})) == (text, version)
        assert told(ask(found, **SAMPLED, speculative={"version": first[1]})) == first
        assert [one["text"] for one in ask(found, **greedy)["choices"]] == written

        before, texts = place.pid, metric(found, "learn_texts_total")
        os.kill(before, signal.SIGKILL)
        assert told(ask(found, **SAMPLED)) == (text, version)
        soon(lambda: metric(found, "learn_restarts_total") == 1 and place.pid != before)
        ask(found, prompt=prompts[0], max_tokens=4)
        soon(lambda: metric(found, "learn_texts_total") > texts)
        assert told(ask(found, **SAMPLED)) == (text, version) and not place.off
        said = found.get("/metrics").text
    check_canary(folder, said + caplog.text + "".join(capfd.readouterr()))


def test_a_canary_is_in_no_file_log_or_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), learning_client(tmp_path) as found:
        ask(found, prompt=CANARY, max_tokens=4)
        until(lambda: metric(found, "learn_texts_total") >= 1, 60)
        add_version(tmp_path, 1, 1)
        ask(found, prompt=CANARY, max_tokens=4)
        said = found.get("/metrics").text + caplog.text
    check_canary(tmp_path, said)


def test_what_opts_out_or_goes_to_another_folder_leaves_a_learner_as_if_it_had_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same texts it knows the same, and learns the same from them but for how numbers are rounded."""
    keys, made = {"keys": ("mine", "other"), "unlearnt_keys": ("other",)}, dict[str, OnlineLearner]()
    own, never = learning._learner, LearningPlan(least=10**6)

    def kept(settings: Settings, folder: VersionFolder, _: object) -> OnlineLearner:
        made[folder.path.name] = own(settings, folder, never)
        return made[folder.path.name]

    monkeypatch.setattr(learning, "_learner", kept)

    def post(found: TestClient, number: int, key: str = "mine", **fields: Any) -> str:
        body = {"prompt": f"{PROMPT}# {number}", "max_tokens": 8, "temperature": 1.0, "seed": number, **fields}
        answer = found.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        return told(answer.json())[1]

    def heard(found: TestClient, number: int, most: int) -> None:
        post(found, number)
        until(lambda: metric(found, "learn_texts_total") == most, 60)

    with learning_client(tmp_path / "alone", **keys) as found:
        for number in range(4):
            heard(found, number, number + 1)
    with learning_client(tmp_path / "beside", **keys) as found, learning_client(tmp_path / "others", **keys) as others:
        for number in range(4):
            post(found, 10 + number, learn=False)
            post(found, 20 + number, cache_salt="a")
            post(found, 30 + number, "other")
            heard(others, 40 + number, number + 1)
            heard(found, number, number + 1)
        assert post(others, 1) == post(found, 1, learn=False), "neither has learnt anything"
        name = add_version(tmp_path / "others", 1, 1)
        assert post(others, 1, learn=False) == name != post(found, 1, learn=False)
    assert made["alone"].digest() == made["beside"].digest() != made["others"].digest()
    alone, beside, elsewhere = (made[name].step() for name in ("alone", "beside", "others"))
    assert alone == pytest.approx(beside, rel=1e-4) != elsewhere
    assert not VersionFolder(tmp_path / "beside").versions()


def test_without_learning_nothing_of_it_runs(app: TestClient) -> None:
    before = threading.enumerate()
    answer = ask(app)
    assert "version" not in answer["polydraft"] and "learn" not in app.get("/metrics").text
    assert not [one for one in threading.enumerate() if one.name == "learner" and one not in before]
    assert app.app.state.desk.learner is None  # pyright: ignore[reportAttributeAccessIssue]
    ask(app, learn=False)
    for fields, param in (({"learn": True}, "learn"), ({"speculative": {"version": "1"}}, "speculative.version")):
        status, said = error(app, prompt=PROMPT, **fields)
        assert (status, said["param"]) == (400, param) and "this server does not learn" in said["message"]


def test_a_second_server_reads_what_the_first_one_learns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), VersionFolder(tmp_path).written() as mine, learning_client(tmp_path) as found:
        assert mine
        until(lambda: found.app.state.desk.learner.off, 60)  # pyright: ignore[reportAttributeAccessIssue]
        name = add_version(tmp_path, 1, 1)
        assert told(ask(found))[1] == name
        assert "learn_texts_total 0" in found.get("/metrics").text.replace('{model_name="polydraft-embedded"}', "")
    assert [one.told["message"] for one in caplog.records if one.getMessage() == "reading versions"] == [
        "another server learns in the folder, so this one uses its versions and learns nothing"
    ]


def test_a_learner_that_ends_costs_nothing_and_is_off_after_three_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = itertools.count()

    def broken(*_: object) -> Any:
        next(begun)
        raise MemoryError("too much")

    monkeypatch.setattr(learning, "_learner", broken)
    with caplog.at_level(logging.WARNING), learning_client(tmp_path) as found:
        until(lambda: found.app.state.desk.learner.off, 60)  # pyright: ignore[reportAttributeAccessIssue]
        assert ask(found)["choices"] and metric(found, "learn_restarts_total") == learners.RESTARTS == 3
    assert next(begun) == 4
    (warned,) = [one.told["message"] for one in caplog.records if one.getMessage() == "warning"]
    assert warned == "the learner ended 4 times, the last time for this reason, and is off: MemoryError: too much"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"draft": "self:int8", "target": "pair"}, "not for the self:int8 drafter: name one by --draft"),
    ({"target": "pair"}, "not for no draft: name one by --draft"),
]


@pytest.mark.parametrize(("settings", "said"), BAD, ids=[str(settings) for settings, _ in BAD])
def test_what_cannot_learn_is_refused_before_anything_is_served(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(PolydraftError, match=rf"--learn is for a draft model of its own, .*{said}"):
        with learning_client(tmp_path, **settings):
            pass


def test_too_little_memory_to_choose_by_is_refused(tmp_path: Path) -> None:
    said = r"--learn-bytes is 1000000, but with this target 200 texts .* take 106496000:"
    with pytest.raises(PolydraftError, match=said):
        with learning_client(tmp_path, learn_bytes=10**6):
            pass


def test_a_folder_of_another_target_is_refused(tmp_path: Path) -> None:
    VersionFolder(tmp_path).check_origin("aa", "bb")
    with pytest.raises(PolydraftError, match="was learnt for another target; name another folder by --learn"):
        with learning_client(tmp_path):
            pass


def test_a_drafter_without_weights_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(PolydraftError, match="--drafter ngram:4 drafts without weights, so that texts would not"),
        learning_client(tmp_path, drafter="ngram:4"),
    ):
        pass


def test_a_lossy_rule_for_all_texts_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(PolydraftError, match="typical acceptance has another: leave --verifier or --learn out"),
        learning_client(tmp_path, verifier="typical"),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"plan": "auto"}, "--plan auto knows what one draft's weights bring"),
        ({"parallel": "2"}, "leave --parallel or --learn out"),
        ({"unlearnt_keys": ("a",), "keys": ("b",)}, "--unlearnt-key must be one of the keys"),
        ({"learn": None, "unlearnt_keys": ("a",), "keys": ("a",)}, "--unlearnt-key is for a server that learns"),
        ({"learn": None, "learn_bytes": 1}, "--learn-bytes is for a server that learns"),
    ],
)
def test_options_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=said):
        Settings(**{"learn": str(tmp_path), **settings})


def test_whether_texts_are_written_is_told_until_it_is_heard(tmp_path: Path) -> None:
    """A learner that does not know it takes all of the time."""
    place = LearnerPlace(Settings(learn=str(tmp_path)), Metrics("m", learns=True), lambda: None)
    place._begun.acquire()
    for _ in range(learners.MOST_TOLD):
        place.hear({})
    place.note(busy=True)
    for _ in range(learners.MOST_TOLD):
        assert place._told.get_nowait() == {}
    place.note(busy=True)
    place.note(busy=True)
    assert place._told.get_nowait() is True and place._told.empty()


def test_a_file_is_no_folder_to_learn_into(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameter, match="is a file, not a folder"):
        folder_of_versions(str(tmp_path / "file"))


class Scripted:
    """A pipe that brings what was put into it, then the end; it tells how long it was listened to at most."""

    def __init__(self, *told: Any) -> None:
        self.told, self.waits, self.said = [*told], list[float](), list[Any]()

    def poll(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.told[0] is not None or bool(self.told.pop(0))

    def recv(self) -> Any:
        told = self.told.pop(0)
        return told() if callable(told) else told

    def send(self, event: Any) -> None:
        self.said.append(event)


class Resting:
    """A learner whose steps take ten seconds each."""

    looks = False
    learns = True

    def __init__(self, folder: Path, clock: "Stepping") -> None:
        self.folder, self.buffer, self.clock, self.mark = VersionFolder(folder), LessonBuffer(1 << 20), clock, ""
        self.done = list[str]()

    def step(self) -> None:
        self.clock.now += 10.0
        self.done.append("step")

    def forget(self) -> None:
        self.mark = self.folder.mark()
        self.done.append("forget")

    def hear(self, lesson: Any) -> None:
        self.done.append(f"{lesson.ids}")


@pytest.mark.wrong_types
def test_a_learner_that_rests_and_hears_lessons_forgets_at_once_and_learns_nothing_of_before(tmp_path: Path) -> None:
    """Behind a step of ten seconds it rests for ninety, while lessons come that were begun before and behind."""
    clock, folder = Stepping(), VersionFolder(tmp_path)
    lesson = {"given": 1, "heat": 1.0, "width": 1, "states": b"\0\0\0\0"}

    def forgets() -> Any:
        folder.forget()
        return {**lesson, "ids": (1, 2), "mark": ""}

    def new() -> Any:
        return {**lesson, "ids": (3, 4), "mark": folder.mark()}

    pipe = Scripted(True, None, forgets, {**lesson, "ids": (5, 6), "mark": ""}, new, None, None, Stop())
    learner = Resting(tmp_path, clock)
    learning._learn(learner, pipe, clock)  # pyright: ignore[reportArgumentType]
    assert learner.done == ["step", "(1, 2)", "forget", "(3, 4)"]
    assert max(pipe.waits) <= 1.0, "it looks whether everything was forgotten while it rests"


class Stepping:
    """A clock that goes on as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.wrong_types
def test_lessons_take_a_fiftieth_of_the_time_while_texts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Stepping(), list[Any]()
    teaching = Teaching(None, said.append, clock)  # pyright: ignore[reportArgumentType]

    def read(self: Teaching, _: object) -> Iterator[None]:
        clock.now += 1.0
        yield
        clock.now += 1.0
        said.append("lesson")

    monkeypatch.setattr(Teaching, "_read", read)
    clock.now = 3600.0  # in which nothing was written
    for number in range(3):
        teaching._open[number] = [1, 2], 1, 1.0, ""
        teaching.gained(number, {"tokens": [3], "finish": ""})
        teaching.gained(number, {"tokens": [4], "finish": "eos"})
        teaching.leaves(number)
    teaching._open["cancelled"] = [1], 1, 1.0, ""
    teaching.leaves("cancelled")
    teaching.teach(idle=False)
    assert clock.now == 3601.0 and teaching.pending
    for now in (3601.0, 3649.0):
        clock.now = now
        teaching.teach(idle=False)
        assert clock.now == now, "not before its share allows it"
    clock.now = 3650.0
    teaching.teach(idle=False)
    assert said == ["lesson"]
    for _ in range(4):
        teaching.teach(idle=True)
    assert said == ["lesson"] * 3 and not teaching.pending
    teaching._open[4] = [1, 2], 1, 1.0, ""
    teaching.stop()
    teaching.gained(4, {"tokens": [3], "finish": "eos"})
    assert not teaching.pending


@pytest.mark.wrong_types
def test_a_text_that_cannot_be_read_ends_learning_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Teaching, _: object) -> Iterator[None]:
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setattr(Teaching, "_read", read)
    teaching = Teaching(None, list[Any]().append)  # pyright: ignore[reportArgumentType]
    teaching._open[0] = [1, 2], 1, 1.0, ""
    teaching.gained(0, {"tokens": [3], "finish": "eos"})
    with pytest.warns(UserWarning, match="nothing more is learnt: out of memory"):
        teaching.teach(idle=True)
    assert not teaching.on and not teaching.pending
