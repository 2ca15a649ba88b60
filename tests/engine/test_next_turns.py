"""What a running batch knows of texts that are over, or of a prompt that several texts have, changes no text."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from doubles import passes_of, perturbed, tiny_model
from families import built
from heads import every_head
from transformers import PreTrainedModel

import polydraft
from polydraft import HuggingFaceModel, LookaheadDrafter, ModelDrafter, OuroborosDrafter, SamplingParams
from polydraft.drafters import Drafter, Session, merge_beside
from polydraft.engine import Ending, Method, Request, RunningBatch, TargetLaw
from polydraft.engine.choices import Choices, chosen_method
from polydraft.engine.many.prompt_reading import PromptChunkSize
from polydraft.probs import Noise
from polydraft.reading import Reader, Text

VOCAB, NEW, ROOM = 24, 10, 110
FIRST = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 7, 3], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7])
QUESTION = [5, 8, 5]
TEXT = ("none", "ngram", "suffix", "jacobi", "recycling", "route", "merge")
DRAFTED = ("lookahead", "ouroboros", "model", "merge beside")
HEADS = ("a block head", "an EAGLE head", "Medusa heads")


@cache
def target(kind: str = "llama") -> PreTrainedModel:
    return built("lfm2", {"layer_types": ["conv", "full_attention"] * 2}) if kind == "lfm2" else tiny_model(kind, VOCAB)


def drafter(name: str, kind: str) -> Drafter | str:
    if name in HEADS:
        return every_head()[name]
    draft = HuggingFaceModel(perturbed(target(kind), 0.05))
    made = {
        "lookahead": lambda: LookaheadDrafter(3, 4, 3, pool_from_prompt=True),
        "ouroboros": lambda: OuroborosDrafter(draft, 3, 2, 3, 4, 3),
        "model": lambda: ModelDrafter(draft),
        "merge beside": lambda: merge_beside(ModelDrafter(draft)),
    }
    return made[name]() if name in made else name


def method_of(name: str, heat: float, kind: str = "llama") -> Method:
    return chosen_method(Choices(drafter(name, kind)), HuggingFaceModel(target(kind)), SamplingParams(temperature=heat))


class Served:
    """A batch that writes texts, each with a method of its own; seeds are numbers of texts."""

    def __init__(
        self, heat: float, kind: str = "llama", size: int = 3, keeps: int = 8, pace: PromptChunkSize | None = None
    ) -> None:
        self.model, self.heat, self.kind = HuggingFaceModel(target(kind)), heat, kind
        plain = chosen_method(Choices("none"), self.model, SamplingParams())
        self.batch = RunningBatch(self.model, plain, size, ROOM, chunk=4, keeps=keeps, pace=pace)
        self.texts: dict[Hashable, list[int]] = {}

    def join(self, name: int, prompt: Sequence[int], method: Method, new: int = NEW, **more: Any) -> int:
        law, ending, noise = TargetLaw(SamplingParams(self.heat)), Ending(len(prompt) + new), Noise.from_seed(name, 1)
        return self.batch.join(Request(name, torch.tensor(prompt), law, ending, noise, method), **more)

    def step(self) -> set[Hashable]:
        """Take a step; return whose texts grew."""
        taken = self.batch.step()
        gains = taken.gains() if taken else {}
        for name, gained in gains.items():
            self.texts.setdefault(name, []).extend(gained.tokens)
        self.batch.sweep()
        return {*gains}

    def exhaust(self) -> None:
        while self.batch.running or self.batch.reading:
            self.step()

    def alone(self, name: int, prompt: Sequence[int], method: Method, new: int = NEW) -> list[int]:
        """Return a text as a run by itself writes it."""
        tokens, ways = torch.tensor([prompt]), {"drafter": method.drafter, "verifier": method.verifier}
        options = {"policy": method.policy, "max_new_tokens": new, "temperature": self.heat, "top_k": 0, "seed": name}
        mask = torch.ones_like(tokens)
        output = polydraft.generate(target(self.kind), tokens, attention_mask=mask, **ways, **options)
        return output.sequences[0, len(prompt) :].tolist()


@contextmanager
def widths_of(served: Served) -> Iterator[list[int]]:
    """Note how many tokens every pass of the target is given."""
    seen = list[int]()
    with passes_of(target(served.kind), lambda shape: seen.append(shape[1])):
        yield seen


def turns(served: Served, methods: Sequence[Method]) -> list[tuple[int, int]]:
    """Write texts and what follows them, compare all with single runs; return tokens known and tokens there were."""
    for name, (prompt, own) in enumerate(zip(FIRST, methods, strict=True)):
        served.join(name, prompt, own, NEW - name)
    served.exhaust()
    known = list[tuple[int, int]]()
    for name, (prompt, own) in enumerate(zip(FIRST, methods, strict=True)):
        assert served.texts[name] == served.alone(name, prompt, own, NEW - name)
        before = [*prompt, *served.texts[name]]
        known.append((served.join(10 + name, [*before, *QUESTION], own), len(before)))
    served.exhaust()
    for name, (prompt, own) in enumerate(zip(FIRST, methods, strict=True)):
        said = [*prompt, *served.texts[name], *QUESTION]
        assert served.texts[10 + name] == served.alone(10 + name, said, own)
    return known


@pytest.mark.long(7)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("name", [*TEXT, *DRAFTED, *HEADS])
def test_the_next_turn_reads_what_is_new_and_is_what_it_is_alone(name: str, heat: float) -> None:
    known = turns(Served(heat), [method_of(name, heat)] * 3)
    assert known == [(count - 1, count) for _, count in known]


@pytest.mark.long(2)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("names", [("model", "route", "merge"), ("lookahead", "a block head", "model")])
def test_turns_with_methods_of_their_own_stand_beside_each_other(names: Sequence[str], heat: float) -> None:
    known = turns(Served(heat), [method_of(name, heat) for name in names])
    assert known == [(count - 1, count) for _, count in known]


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_turns_of_models_that_cannot_branch_are_known(name: str) -> None:
    known = turns(Served(0.9, "bloom"), [method_of(name, 0.9, "bloom")] * 3)
    assert known == [(count - 1, count) for _, count in known]


def test_of_models_with_states_prompts_stay_known() -> None:
    served, method = Served(0.9, "lfm2"), method_of("none", 0.9, "lfm2")
    prompt, beside = FIRST[2], FIRST[0]
    served.join(0, prompt, method)
    served.join(9, beside, method)
    served.exhaust()
    said = [*prompt, *served.texts[0], *QUESTION]
    assert served.join(1, said, method) == len(prompt) - 1
    served.exhaust()
    assert served.texts[9] == served.alone(9, beside, method) and served.texts[1] == served.alone(1, said, method)


def test_only_what_begins_alike_counts_and_a_text_with_a_salt_is_not_kept() -> None:
    served, method = Served(0.9), method_of("model", 0.9)
    prompt = FIRST[2]
    served.join(0, prompt, method)
    served.exhaust()
    text = served.texts[0]
    other = [*prompt, *text[:4], (text[4] + 1) % VOCAB, *QUESTION]
    assert served.join(1, other, method, shares=False) == 0
    assert served.join(2, other, method) == len(prompt) + 4
    served.exhaust()
    assert served.texts[1] == served.alone(1, other, method) and served.texts[2] == served.alone(2, other, method)
    again = [*other, *served.texts[1]]
    assert served.join(3, [*again, 1], method) < len(again) - 1
    assert served.join(4, [*other, *served.texts[2], 1], method) == len(other) + NEW - 1


def test_a_text_that_leaves_is_kept_unless_it_failed_and_no_more_than_there_may_be() -> None:
    served, method = Served(0.0, keeps=2), method_of("none", 0.0)
    for name, prompt in enumerate(FIRST):
        served.join(name, prompt, method, 30)
    while len(served.texts.get(2, ())) < 9:
        served.step()
    served.batch.leave(0, keeps=False)
    served.batch.leave(2)
    texts = [[*prompt, *served.texts[name]] for name, prompt in enumerate(FIRST)]
    lost, left = (served.join(10 + name, [*texts[name], 1], method) for name in (0, 2))
    assert lost < len(FIRST[0]) and left == len(texts[2]) - 1
    assert len(served.batch._kept._pasts) == 2
    served.exhaust()
    assert served.texts[12] == served.alone(12, [*texts[2], 1], method)
    assert len(served.batch._kept._pasts) == 2


@pytest.mark.parametrize("beside", [0, 1])
def test_the_first_token_comes_in_the_step_in_which_the_prompt_ends(beside: int) -> None:
    served, method = Served(0.9), method_of("model", 0.9)
    if beside:
        served.join(0, [7], method, 40)
        served.step()
    served.join(1, FIRST[2], method)
    grew = list[bool]()
    while any(one.name == 1 for one in served.batch.reading):
        grew.append(1 in served.step())
    assert grew == [False, False, True]  # ten tokens before the last, four in each step


@pytest.mark.long
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize(("size", "keeps", "shares"), [(4, 8, True), (5, 0, True), (5, 8, False), (2, 8, True)])
@pytest.mark.parametrize("name", ["model", "lookahead", "route", "an EAGLE head", "self:keys=snap:4"])
def test_a_prompt_of_several_texts_is_read_once(name: str, size: int, keeps: int, shares: bool, heat: float) -> None:
    served, method = Served(heat, size=size, keeps=keeps), method_of(name, heat)
    prompt, known, left = FIRST[2], list[int](), [*range(5)]
    while left or served.batch.running or served.batch.reading:
        while left and served.batch.free:
            own = left.pop(0)
            known.append(served.join(own, prompt, method, NEW - own, shares=shares, kin="request"))
        served.step()
    assert all(served.texts[own] == served.alone(own, prompt, method, NEW - own) for own in range(5))
    assert known == [0, *[len(prompt) - 1 - bool(method.drafter.needs.layers)] * 4]


def test_choices_wait_for_the_first_and_nobody_waits_for_them() -> None:
    served, method = Served(0.0, size=4), method_of("none", 0.0)
    with widths_of(served) as seen:
        known = [served.join(own, FIRST[2], method, kin="request") for own in range(3)]
        served.join(3, FIRST[1], method)
        grew = [served.step() for _ in range(4)]
    assert known == [0, 10, 10]
    assert seen[:5] == [4, 2, 2, 1, 4]  # the other prompt is read behind the first chunk, while two texts wait
    assert grew == [set(), {3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_who_waits_for_a_text_that_leaves_reads_the_prompt_itself() -> None:
    served, method = Served(0.9, size=4), method_of("model", 0.9)
    for own in range(3):
        served.join(own, FIRST[2], method, kin="request", shares=False)
    served.step()
    served.batch.leave(0)
    assert served.join(3, FIRST[2], method, kin="another", shares=False) == 0
    with widths_of(served) as seen:
        served.exhaust()
    assert sum(width for width in seen if width > 1) >= 20 and set(served.texts) == {1, 2, 3}
    assert all(served.texts[own] == served.alone(own, FIRST[2], method) for own in (1, 2, 3))


def test_methods_of_their_own_share_the_targets_keys_alone() -> None:
    served, other = Served(0.9, size=4), ModelDrafter(HuggingFaceModel(perturbed(target(), 0.3)))
    ways = [method_of(name, 0.9) for name in ("model", "ngram", "an EAGLE head")]
    ways.append(chosen_method(Choices(other), served.model, SamplingParams(temperature=0.9)))
    known = [served.join(own, FIRST[2], method, kin="request") for own, method in enumerate(ways)]
    served.exhaust()
    assert known == [0, 10, 0, 10]
    assert all(served.texts[own] == served.alone(own, FIRST[2], method) for own, method in enumerate(ways))


class Ticking:
    """A clock that goes on with the passes of a model: so long for each, and so long for each token."""

    def __init__(self, each: float, token: float) -> None:
        self.now, self.each, self.token = 0.0, each, token

    def __call__(self) -> float:
        return self.now

    def __enter__(self) -> None:
        def passed(shape: tuple[int, int]) -> None:
            self.now += self.each + self.token * shape[0] * shape[1]

        self._watch = passes_of(target(), passed)
        self._watch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__(None, None, None)


@pytest.mark.parametrize(("each", "token"), [(1.0, 0.05), (0.1, 0.05), (0.0, 0.2), (3.0, 0.01)])
def test_a_stream_waits_three_steps_at_most_beside_a_long_prompt(each: float, token: float) -> None:
    clock, method, long = Ticking(each, token), method_of("none", 0.0), [*range(VOCAB)] * 3
    served = Served(0.0, keeps=0, pace=PromptChunkSize(64, clock, least=4))
    served.join(0, [7], method, 80)
    with clock, widths_of(served) as seen:
        served.step()
        begun, gaps, step = clock.now, list[float](), each + token
        served.join(1, long, method)
        while served.batch.reading:
            assert 0 in served.step()
            gaps.append(clock.now - begun)
            begun = clock.now
    assert sum(width for width in seen if width > 1) == len(long) - 1
    floor = each + 4 * token
    assert max(gaps[:-1]) <= step + max(2 * step, floor) + 1e-9  # the last step has the new text too
    fixed = (len(long) - 1) / 64
    assert len(gaps) > fixed and sum(gaps) < 3 * (each + token) * len(long)


def test_a_pace_learns_from_what_was_measured() -> None:
    clock = Ticking(0.0, 0.0)
    pace = PromptChunkSize(100, clock, least=10)

    def step(tokens: int, read: float, took: float) -> int | None:
        pace.begins(reads=True)
        clock.now += read
        pace.has_read(tokens)
        clock.now += took
        pace.has_stepped()
        return pace.size(delays=True)

    assert (pace.size(delays=True), pace.size(delays=False)) == (10, 100)
    assert step(10, 0.5, 1.0) == 40  # no more than 2.0 for 40 tokens, if all of it is for tokens
    assert step(40, 5.0, 1.0) == 10  # 10 take no more than 2.0 if a pass without tokens takes 1.0
    assert step(40, 1.0, 1.0) == 80
    assert step(80, 2.0, 1.0) == 80
    assert step(80, 2.0, 99.0) == 80 and step(3, 9.0, 1.0) == 80  # a disturbed step, and a prompt's last tokens
    assert step(80, 1e9, 1.0) == 10 and step(10, 1e-9, 1.0) == 100
    pace.begins(reads=False)
    clock.now += 9.0
    pace.has_read(0)
    pace.has_stepped()
    assert pace.size(delays=True) == 100
    assert PromptChunkSize(4, clock).size(delays=True) == 4 and PromptChunkSize(None, clock).size(delays=True) is None


def test_where_nobody_waits_the_most_is_read() -> None:
    served, method = Served(0.0, keeps=0, pace=PromptChunkSize(40, Ticking(1.0, 1.0))), method_of("none", 0.0)
    served.join(0, [*range(VOCAB)] * 3, method)
    with widths_of(served) as seen:
        served.exhaust()
    assert seen[:2] == [40, 31]


@pytest.mark.long(3)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("name", ["none", "recycling", "lookahead", "ouroboros", "model", "a block head"])
def test_no_text_depends_on_chunks_that_change(name: str, heat: float) -> None:
    random, now = Random(5), [0.0]

    def clock() -> float:
        now[0] += random.choice((0.5, 0.8, 1.0, 1.3, 2.0))
        return now[0]

    served, method = Served(heat, pace=PromptChunkSize(12, clock, least=2)), method_of(name, heat)
    prompts = [[7], *([*range(own, VOCAB)] * 2 for own in range(4))]
    with widths_of(served) as seen:
        for own, prompt in enumerate(prompts):
            while not served.batch.free:
                served.step()
            served.join(own, prompt, method, NEW if own else 60)
            served.step()
        served.exhaust()
    for own, prompt in enumerate(prompts):
        assert served.texts[own] == served.alone(own, prompt, method, NEW if own else 60)
    assert len({*seen} & {*range(2, 13)}) > 4


class Full(ModelDrafter):
    """A drafter that has room for two texts and for no copy."""

    def start(self, text: Text, session: Session) -> Any:
        started.append(1)
        if len(started) > 2:
            raise MemoryError("no room for another state")
        return super().start(text, session)


started = list[int]()


def test_a_text_that_cannot_be_kept_costs_nobody_anything() -> None:
    usual = method_of("model", 0.9)
    model = usual.drafter
    assert isinstance(model, ModelDrafter)
    method, served = replace(usual, drafter=Full(model.model)), Served(0.9)
    started.clear()
    served.join(0, FIRST[0], method, 4)
    served.join(1, FIRST[1], method, 12)
    served.exhaust()
    assert len(started) > 2 and [len(served.texts[name]) for name in (0, 1)] == [4, 12]
    assert served.texts[1] == served.alone(1, FIRST[1], usual, 12)


def ended() -> tuple[Served, Method]:
    """Return a batch of which the text in the first of two rows has ended."""
    served, method = Served(0.9), method_of("model", 0.9)
    served.join(0, FIRST[0], method, 6)
    while not served.batch.running:
        served.batch.read()
    served.join(1, FIRST[1], method, 30)
    while len(served.texts.get(0, ())) < 6 or len(served.batch.running) < 2:
        taken = served.batch.step()
        for name, gained in (taken.gains() if taken else {}).items():
            served.texts.setdefault(name, []).extend(gained.tokens)
    return served, method


def test_an_interrupt_while_ended_texts_leave_keeps_no_texts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when the keys of a row that moves are there and its tokens are not, and done again."""
    (served, method), put, interrupts = ended(), Reader.put, list[int]()

    def interrupted(reader: Reader, row: int, other: Reader) -> Reader:
        after = put(reader, row, other)
        if len(reader.read) == 2 and not interrupts:
            interrupts.append(row)
            raise KeyboardInterrupt
        return after

    monkeypatch.setattr(Reader, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.batch.sweep()
    served.batch.sweep()
    again = [*FIRST[0], *served.texts[0], *QUESTION]
    assert interrupts == [0] and served.join(2, again, method) > len(FIRST[0])
    served.exhaust()
    assert served.texts[2] == served.alone(2, again, method)
