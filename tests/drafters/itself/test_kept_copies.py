"""Copies that stay over steps: rows that come, go and are taken back, steps that are taken again, texts that go on."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import tiny_model
from families import built
from key_views import EVERY, FIRST, chain_of, few, started, text_of
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import ByShape, Chain, Recent, Snap
from polydraft.drafters import Keys, LookupFirst, SelfDrafter, View
from polydraft.drafters.itself.few_keys import UNCHOSEN, FewKeys, NewestQueries
from polydraft.drafters.itself.self_drafter import SelfDraftState
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, step
from polydraft.models import HuggingFaceModel, LayerSet
from polydraft.models.derived import derived
from polydraft.models.tiny import tiny_of_type
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader
from polydraft.rows import cut, put, reuse, select

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "eos_token_id": None}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [7, 2, 1], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [4]]
every_keys = pytest.mark.parametrize("keys", FIRST, ids=str)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=3)


def texts(target: PreTrainedModel, prompts: list[list[int]], **options: Any) -> dict[Any, list[int]]:
    run = polydraft.generate_many(target, prompts, **options)
    found = {one.name: one.tokens for one in run}
    assert not run.statistics.fallback
    return found


def alone(target: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    found = polydraft.generate(target, ids, attention_mask=torch.ones_like(ids), **options)
    assert not found.statistics.fallback
    return found.sequences[0, len(prompt) :].tolist()


# What is written.


@every_keys
def test_greedy_texts_are_plain_ones_in_a_running_batch(target: PreTrainedModel, keys: Keys) -> None:
    """Texts join and leave, and keys of all are chosen anew on the way."""
    plain = texts(target, PROMPTS, drafter="none", max_new_tokens=24, **GREEDY)
    for size in (1, 3):
        options = {"drafter": few(keys), "policy": 3, "batch_size": size, "max_new_tokens": 24}
        assert texts(target, PROMPTS, **options, **GREEDY) == plain


@every_keys
@pytest.mark.parametrize("policy", [3, pytest.param("2,2,1", marks=pytest.mark.slow)])
def test_a_seed_writes_what_it_writes_alone(target: PreTrainedModel, keys: Keys, policy: object) -> None:
    """Each row has copies and choices of its own."""
    options = {"drafter": few(keys), "policy": policy, "max_new_tokens": 20, **SAMPLED}
    if policy != 3:
        options["verifier"] = "recursive"
    together = texts(target, PROMPTS[:3], batch_size=3, seed=5, **options)
    assert together == texts(target, PROMPTS[:3], batch_size=1, seed=5, **options)


@pytest.mark.parametrize("keys", EVERY, ids=str)
def test_a_view_of_all_keys_accepts_every_draft(target: PreTrainedModel, keys: Keys) -> None:
    """Whatever chooses: a text that is not longer than the budget and the room keeps all."""
    whole = replace(keys, room=100)  # type: ignore[type-var]
    for options in (GREEDY, SAMPLED):
        ids = torch.tensor([PROMPTS[0][:8]])
        found = polydraft.generate(target, ids, drafter=few(whole), policy=3, max_new_tokens=41, **options)
        assert found.statistics.accepted == found.statistics.drafted == 30


def test_keys_are_chosen_anew_when_there_is_no_room(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first tree and then whenever copies, the root and the tree do not fit; in between they are copied."""
    lengths, chosen = list[int](), Snap.slots

    def noted(self: Snap, known: int, *given: Tensor) -> Tensor:
        lengths.append(known)
        return chosen(self, known, *given)

    monkeypatch.setattr(Snap, "slots", noted)
    alone(target, PROMPTS[0], drafter=few(Snap(10, 12)), policy=3, max_new_tokens=50, **GREEDY)
    assert lengths[::3] == lengths[1::3] == lengths[2::3], "once for each of three layers"
    assert lengths[0] == 14 and len(lengths) > 9
    assert all(12 - 3 - 4 <= after - before <= 12 for before, after in zip(lengths[::3], lengths[3::3], strict=False))


def test_a_route_takes_turns_with_lookups(target: PreTrainedModel) -> None:
    """Tokens that others drafted have queries and keys, too."""
    prompt = [5, 8, 2, 5, 8, 2, 5, 8, 2, 5, 8, 2, 5]
    for keys in EVERY[:2]:
        drafter = LookupFirst(few(keys), 1)
        assert alone(target, prompt, drafter=drafter, policy=3, max_new_tokens=30, **GREEDY) == alone(
            target, prompt, drafter="none", max_new_tokens=30, **GREEDY
        )


@every_keys
def test_a_next_turn_goes_on_from_a_past(target: PreTrainedModel, keys: Keys) -> None:
    ids, options = torch.tensor([PROMPTS[0]]), {"max_new_tokens": 20, **GREEDY}
    first = polydraft.generate(target, ids, drafter=few(keys), policy=3, keep_past=True, **options)
    longer = torch.cat([first.sequences, torch.tensor([[7, 3]])], 1)
    plain = polydraft.generate(target, longer, drafter="none", **options).sequences
    for given in ({"past": first.past}, {}):
        found = polydraft.generate(target, longer, drafter=few(keys), policy=3, **given, **options)
        assert torch.equal(found.sequences, plain) and not found.statistics.fallback


def test_keys_are_chosen_behind_a_past_as_behind_a_prompt_that_is_read(target: PreTrainedModel) -> None:
    """A past keeps no queries: those that choose keys are asked for again, not the last token's alone."""
    ids, drafter = torch.randint(1, 23, (1, 60), generator=torch.Generator().manual_seed(3)), few(Snap(8))
    options: dict[str, Any] = {"policy": 3, "max_new_tokens": 12, **GREEDY}
    past = polydraft.generate(target, ids, drafter="none", keep_past=True, max_new_tokens=1, **GREEDY).past
    read, kept = (polydraft.generate(target, ids, drafter=drafter, **options, past=one) for one in (None, past))
    assert kept.statistics.prompt_known == ids.shape[1] - 1 - drafter.needs.queries > 0
    assert kept.statistics.accepted_at == read.statistics.accepted_at and torch.equal(kept.sequences, read.sequences)


def test_another_model_reads_the_copies() -> None:
    """Weights of eight bits over copies of the target's keys: near the target's rows, and not the same."""
    module = tiny_model("llama", dtype=torch.float32)
    whole, eight = HuggingFaceModel(module), HuggingFaceModel(derived(module, "self:int8"))
    text = text_of([PROMPTS[0], PROMPTS[2]])
    reader, queries = started(whole, text)
    drafts, rows = torch.tensor([[4, 2], [6, 1]]), list[Tensor]()
    for model in (None, eight):
        _, view = FewKeys((UNCHOSEN,) * 2).following(Recent(4, 20), reader.at(text), queries, 3, 64, model)
        rows.append(chain_of(view, text, drafts).softmax(-1))
    apart = (rows[0] - rows[1]).abs().sum(-1) / 2
    assert 0 < float(apart.max()) and float(apart.mean()) < 0.2


# Steps that are taken again, and verbs of rows.


@every_keys
def test_a_step_may_be_taken_again(target: PreTrainedModel, keys: Keys) -> None:
    """With the batch of before, however far the other try came; also where keys are chosen anew in it."""
    prompts, params = text_of([PROMPTS[0], PROMPTS[2]]), SamplingParams(temperature=1.0)
    endings, laws = (Ending(max_length=50),) * 2, (TargetLaw(params),) * 2
    method = Method(few(keys), ByShape(), Chain(3))
    batch = begin(HuggingFaceModel(target), method, Prompts(prompts, laws, endings, Noise.from_seed(3, 2)))
    while batch.going:
        first, block, _ = step(batch)
        for _ in range(2):
            again, other, _ = step(batch)
            assert torch.equal(other.tree.tokens, block.tree.tokens) and torch.equal(
                other.verdict.path, block.verdict.path
            )
            assert again.text.counts == first.text.counts
        batch = again


def state_of(model: HuggingFaceModel, keys: Keys, rows: list[list[int]]) -> tuple[SelfDraftState, Reader]:
    """Return a state of rows for which a tree was drafted, and the target's reader."""
    text = text_of(rows)
    reader, queries = started(model, text, 4)
    own, _ = FewKeys((UNCHOSEN,) * len(rows)).following(keys, reader.at(text), queries, 4, 64)
    return SelfDraftState(SamplingParams(), model, 64, 4, own, queries), reader


def rows_of(state: SelfDraftState, reader: Reader, keys: Keys, rows: list[list[int]]) -> Tensor:
    """Return what the view says of chains below texts that go on from where the state is."""
    text = text_of(rows)
    _, view = state.own.following(keys, reader.at(text), state.queries, 4, 64)
    return chain_of(view, text, torch.tensor([[4, 2]] * len(rows)))


KEYS = Snap(6, 8)
ROWS = [PROMPTS[0], PROMPTS[2], [9, 9, 8, 7, 9, 8, 9, 3]]


@pytest.fixture(scope="module")
def model(target: PreTrainedModel) -> HuggingFaceModel:
    return HuggingFaceModel(target)


@pytest.mark.parametrize("row", range(3))
def test_a_row_by_itself_says_what_it_says_beside_others(model: HuggingFaceModel, row: int) -> None:
    state, reader = state_of(model, KEYS, ROWS)
    whole = rows_of(state, reader, KEYS, ROWS)
    single = select(state, [row])
    found = rows_of(single, reader.select([row]), KEYS, [ROWS[row]])
    torch.testing.assert_close(found[0], whole[row], atol=1e-9, rtol=0)
    assert single.own.chosen == state.own.chosen[row : row + 1], "its keys were not chosen anew"


@pytest.mark.parametrize("drafted", [True, False], ids=["with copies", "without"])
@pytest.mark.parametrize("place", range(4))
def test_a_row_that_joins_says_what_it_says_alone(model: HuggingFaceModel, place: int, drafted: bool) -> None:
    state, reader = state_of(model, KEYS, ROWS)
    newcomer = [2, 7, 1, 2, 9, 4, 4, 1, 3, 3]
    single, own = state_of(model, KEYS, [newcomer])
    expected = rows_of(single, own, KEYS, [newcomer])[0]
    before = rows_of(state, reader, KEYS, ROWS)
    if not drafted:
        single = replace(single, own=FewKeys((UNCHOSEN,)))
    joined, rows = put(state, place, single), [*ROWS[:place], newcomer, *ROWS[place + 1 :]]
    found = rows_of(joined, reader.put(place, own), KEYS, rows)
    torch.testing.assert_close(found[place], expected, atol=1e-9, rtol=0)
    for row in range(3):
        if row != place:
            torch.testing.assert_close(found[row], before[row], atol=1e-9, rtol=0)


@pytest.mark.parametrize("length", [0, 5, 13, 14, 16, 40])
def test_what_is_taken_back_is_not_seen(model: HuggingFaceModel, length: int) -> None:
    """A text is cut, and goes on in another way: among the copies behind the choice, or before it."""
    state, reader = state_of(model, KEYS, ROWS)
    text = text_of([[*row, 1, 2, 3] for row in ROWS])
    reader, _ = reader.catch_up(text)
    own, _ = state.own.following(KEYS, reader.at(text), state.queries, 4, 64)
    state = cut(replace(state, own=own), 0, length)
    kept = min(length, 17)
    other = [*[*ROWS[0], 1, 2, 3][:kept], *[6] * 3, 8]
    reader, _ = reader.cut(0, kept).catch_up(text_of([other, *([*row, 1, 2, 3] for row in ROWS[1:])]))
    rows = [other, *([*row, 1, 2, 3] for row in ROWS[1:])]
    assert (state.own.chosen[0] == UNCHOSEN) == (length < 14) and state.own.chosen[1:] == own.chosen[1:]
    assert all(one.end <= max(length, 14) for one in state.queries)
    found = rows_of(state, reader, KEYS, rows)
    fresh = FewKeys((UNCHOSEN,))
    if length < 14:
        expected, _ = fresh.following(KEYS, reader.select([0]).at(text_of([other])), state.queries[:1], 4, 64)
    else:
        first, _ = fresh.following(
            KEYS, reader.select([0]).at(text_of([ROWS[0]])), state_of(model, KEYS, ROWS[:1])[0].queries, 4, 64
        )
        expected, _ = first.following(KEYS, reader.select([0]).at(text_of([other])), state.queries[:1], 4, 64)
    assert expected.reader is not None
    view = chain_of(expected.reader, text_of([other]), torch.tensor([[4, 2]]))
    torch.testing.assert_close(found[0], view[0], atol=1e-9, rtol=0)


def test_nothing_but_queries_is_kept_over_texts(model: HuggingFaceModel) -> None:
    state, _ = state_of(model, KEYS, ROWS[:1])
    fresh = replace(state, own=FewKeys((UNCHOSEN,)), queries=(NewestQueries(),))
    kept = reuse(state, fresh, 12)
    assert kept.own is fresh.own and kept.queries[0].end == 12 and state.resumes(fresh)
    assert kept.queries[0].states is not None and len(kept.queries[0].states) == 2
    assert not state.resumes(replace(fresh, most=32))


def test_queries_with_a_gap_are_forgotten() -> None:
    one, widths = torch.ones(3, 2), (2,)
    found = NewestQueries().followed(0, one, widths, 4).followed(3, 2 * one, widths, 4)
    assert found.end == 6 and found.states is not None and found.states[:, 0].tolist() == [1, 2, 2, 2]
    assert found.followed(5, 3 * one[:1], widths, 4).states[:, 0].tolist() == [1, 2, 2, 3]  # type: ignore[index]
    assert found.followed(9, one, widths, 4).states.tolist() == one.tolist()  # type: ignore[union-attr]
    assert found.cut(2).states is None and found.cut(4).end == 4 and found.cut(9) is found


@pytest.mark.parametrize("keys", EVERY, ids=str)
def test_an_exit_sees_few_keys_of_the_layers_that_run(keys: Keys) -> None:
    target = tiny_model(num_hidden_layers=3)
    ids, drafter = torch.tensor([PROMPTS[0]]), SelfDrafter(View(layers=LayerSet(exit=2), keys=keys))
    found = polydraft.generate(target, ids, drafter=drafter, policy=3, max_new_tokens=12, **GREEDY)
    assert found.statistics.drafted and not found.statistics.fallback
    plain = polydraft.generate(target, ids, drafter="none", max_new_tokens=12, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences)


# What is refused, and what falls back.


def test_what_cannot_be_viewed_is_written_without_drafts() -> None:
    model, ids = built("cohere2", {"vocab_size": 24}), torch.tensor([PROMPTS[0]])
    plain = polydraft.generate(model, ids, drafter="none", max_new_tokens=6, **GREEDY)
    with pytest.warns(RuntimeWarning, match="passes hand out no queries, by which these keys are chosen"):
        found = polydraft.generate(model, ids, drafter=few(Snap(8)), policy=3, max_new_tokens=6, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("keys", "name", "told"),
    [
        (Snap(500), "llama", "keys=snap:500 chooses 500 keys, but the target's context has 128"),
        (Recent(), "llama", "chooses 256 keys, but the target's context has 128"),
        (Snap(8), "bloom", "cannot branch has no keys to draft from in part"),
        (Recent(1, 4), "deepseek_v32", "Layers of this target choose what they attend to, so self:keys=recent:1.4"),
    ],
)
def test_keys_that_a_model_cannot_have_are_refused(keys: Keys, name: str, told: str) -> None:
    model = tiny_of_type(name) if name == "deepseek_v32" else tiny_model(name)
    with pytest.raises(polydraft.errors.PolydraftError, match=told):
        polydraft.generate(model, torch.tensor([PROMPTS[0]]), drafter=few(keys), max_new_tokens=6)


def test_recurrent_models_are_refused() -> None:
    with pytest.raises(polydraft.errors.UnsupportedModel, match="self:keys=snap:8\\) cannot share"):
        polydraft.generate(
            built("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
            torch.tensor([[3, 1]]),
            drafter=few(Snap(8)),
            max_new_tokens=2,
        )


def test_without_memory_for_copies_rows_are_plain(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([PROMPTS[0]])
    plain = polydraft.generate(target, ids, drafter="none", max_new_tokens=12, **GREEDY)

    def refused(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(FewKeys, "_with_room", refused)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError: no more"):
        found = polydraft.generate(target, ids, drafter=few(Snap(8)), policy=3, max_new_tokens=12, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences) and not found.statistics.drafted
