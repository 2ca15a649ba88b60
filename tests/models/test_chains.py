"""Models that cannot branch: the text is Hugging Face's, whatever was rejected before, alone and in batches."""

import copy
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from doubles import tiny_model, tiny_tokenizer
from families import GREEDY, NEW, PROMPT, built, theirs
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, ModelDrafter, NgramDrafter, Planner, Widths
from polydraft.conformance import check
from polydraft.drafters import merge_beside, route_first
from polydraft.engine import Ending, Method, Prompts
from polydraft.engine.loop.step import begin, step
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel, Pair
from polydraft.models.checks.room import cache_bytes
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import ChainReader, Features, Step, Text, reader_of
from polydraft.trees import EAGLE_25, TokenTree, TreeShape, Verdict, topology
from polydraft.verifiers import BlockVerification, NaiveMatch, TopDown

TURNS = ["linear_attention", "full_attention"] * 2
DELTA = {
    "layer_types": TURNS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
LISTS = {
    "nemotron_h": ["linear_attention", "full_attention", "mlp", "linear_attention"],
    "zamba2": ["linear_attention", "hybrid"] * 2,
}
REMEMBERING: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_5_text": DELTA,
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": DELTA,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": TURNS,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "zaya": {},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
}
COUNTING: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
}
BOUNDED: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "layers_block_type": LISTS["nemotron_h"],
    },
    "zamba2": {
        "layers_block_type": LISTS["zamba2"],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
}
"""Families whose time steps have a lower bound."""
FAMILIES = {**REMEMBERING, **COUNTING}
QUICK = ("lfm2", "qwen3_5_text", "rwkv", "gpt_neo")
"""The families of the ordinary suite; others are in its other tests, or in the slow one."""


@cache
def tiny(name: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """Return a small random model of a family."""
    known = {
        **FAMILIES,
        **BOUNDED,
        "mamba": {"state_size": 8},
        "jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    }[name]
    return built(name, {**known, **changes}, seed)


def half_right(name: str) -> ModelDrafter:
    """Return a drafter that is right about half of the time: the same model with other weights in its head."""
    model = tiny(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        other = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(
                0.05 * weights.abs().mean() * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
            )
    return ModelDrafter(HuggingFaceModel(other.eval()))


@pytest.mark.long(1)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in FAMILIES])
def test_greedy_text_is_hugging_faces(name: str) -> None:
    model = tiny(name)
    door, expected = HuggingFaceModel(model), theirs(model, PROMPT)
    assert not door.facts.branches and door.facts.remembers == (name in REMEMBERING)
    for drafter in (NgramDrafter(), half_right(name), ModelDrafter(door)):
        found = polydraft.generate(
            model, torch.tensor([PROMPT]), drafter=drafter, policy=Chain(4), max_new_tokens=NEW, **GREEDY
        )
        assert found.sequences[0, len(PROMPT) :].tolist() == expected
    steps = found.statistics
    assert steps.accepted == steps.new_tokens - steps.steps, "a draft by the target itself is always accepted"
    prompts = [PROMPT, PROMPT[:9], PROMPT[4:5]]
    for drafter in (half_right(name), ModelDrafter(door)):
        many = polydraft.generate_many(
            model, prompts, drafter=drafter, policy=Chain(3), batch_size=2, max_new_tokens=20, **GREEDY
        )
        assert {one.name: one.tokens for one in many} == {
            place: theirs(model, one, 20) for place, one in enumerate(prompts)
        }


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "bloom"])
def test_a_left_padded_batch_is_its_rows(name: str) -> None:
    model = tiny(name)
    ids = torch.zeros(2, 12, dtype=torch.int64)
    ids[0], ids[1, 5:] = torch.tensor(PROMPT[:12]), torch.tensor(PROMPT[:7])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    found = polydraft.generate(
        model, ids, attention_mask=mask, drafter=half_right(name), policy=Chain(3), max_new_tokens=20, **GREEDY
    )
    assert found.sequences[0, 12:].tolist() == theirs(model, PROMPT[:12], 20)
    assert found.sequences[1, 12:].tolist() == theirs(model, PROMPT[:7], 20)


@pytest.mark.long(1)
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "mpt"])
def test_a_seed_gives_a_text_whatever_batch_it_is_in(name: str) -> None:
    model = tiny(name)
    options: dict[str, Any] = {"drafter": half_right(name), "policy": Chain(3), "temperature": 1.0}
    options |= {"max_new_tokens": 30, "eos_token_id": None}
    alone = polydraft.generate(model, torch.tensor([PROMPT]), seed=5, **options).sequences[0, len(PROMPT) :].tolist()
    own = {0: {"seed": 5}, 1: {"seed": 6}, 2: {"seed": 5}}
    many = polydraft.generate_many(model, [PROMPT, PROMPT[:7], PROMPT], batch_size=2, per_prompt=own, **options)
    found = {one.name: one.tokens for one in many}
    assert found[0] == found[2] == alone


@pytest.mark.long(1)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one != "lfm2")) for one in FAMILIES])
@pytest.mark.parametrize("verifier", [TopDown(NaiveMatch()), BlockVerification()], ids=["naive", "block"])
def test_sampled_text_has_the_models_law(name: str, verifier: Any) -> None:
    """Sampled texts are consistent with the enumerated law; a right engine fails with probability 1e-6."""
    model = tiny(name, vocab_size=5)
    drafter = ModelDrafter(HuggingFaceModel(tiny(name, seed=2, vocab_size=5)))

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        found = polydraft.generate(
            model,
            torch.tensor(prompts),
            drafter=drafter,
            verifier=verifier,
            policy=Chain(2),
            max_new_tokens=3,
            temperature=1.0,
            eos_token_id=None,
            seed=seeds[0],
        )
        return found.sequences[:, len(prompts[0]) :].tolist()

    report = check(generate, model, [[1, 2, 3]], batch_size=64, most_samples=640, params=SamplingParams())
    assert report.passed, str(report)


def test_a_step_may_be_taken_again() -> None:
    for name in ("lfm2", "bloom"):
        door, drafter = HuggingFaceModel(tiny(name)), half_right(name)
        method = Method(drafter, BlockVerification(), Chain(3))
        lengths = torch.tensor([9, 4])
        text = Text(torch.tensor([PROMPT[:9], [*PROMPT[:4], 0, 0, 0, 0, 0]]), lengths)
        prompts = Prompts(text, (TargetLaw(),) * 2, (Ending(max_length=60),) * 2, Noise.from_seed(3, 2))
        batch = begin(door, method, prompts, capacity=80)
        for _ in range(6):
            once, first, _ = step(batch)
            batch, second, _ = step(batch)
            assert first.rows == second.rows
            assert once.text.counts == batch.text.counts


@pytest.mark.parametrize("name", ["lfm2", "gpt_neo"])
def test_hidden_states_of_every_token_come_once(name: str) -> None:
    """Those of a prompt, of unread tokens and of accepted nodes are a plain pass's, however often tokens are read."""
    door = HuggingFaceModel(tiny(name))
    rows = [PROMPT[:11], PROMPT[5:9]]
    heard: list[dict[int, torch.Tensor]] = [{}, {}]
    reader = reader_of(door, 2, 80, (1, "final"))
    text = _text(rows)
    reader, features = reader.catch_up(text, 3)
    _note(heard, features)
    reader, features = reader.catch_up(text)
    _note(heard, features)
    for kept in ([0, 2], [1, 0], [3, 3], [0, 1], [0, 0]):
        step, reader, rows = _step(reader, text, rows, kept)
        _note(heard, step.features)
        text = _text(rows)
    for row, told in zip(rows, heard, strict=True):
        assert sorted(told) == list(range(len(row) - 1))
        whole = reader_of(door, 1, 80, (1, "final")).catch_up(_text([row]))[1]
        assert whole is not None
        for place, states in told.items():
            assert torch.allclose(states, whole.states[1][0, place], atol=1e-9)


def _text(rows: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(rows), 64, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def _note(heard: list[dict[int, torch.Tensor]], features: Features | None) -> None:
    assert features is not None
    for row, places in enumerate(features.places.tolist()):
        for column, place in enumerate(places):
            if place >= 0:
                assert place not in heard[row], f"token {place} of row {row} came twice"
                heard[row][place] = features.states[1][row, column]


def _step(reader: Any, text: Text, rows: list[list[int]], kept: list[int]) -> tuple[Any, Any, list[list[int]]]:
    """Score a chain of three drafts of which so many are kept, and a next token."""
    shape = TreeShape(((1,), (1,), (1,)))
    tokens = torch.tensor([[row[-1], 7, 9, 11] for row in rows])
    tree = TokenTree(tokens, topology(shape, 2, torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))
    scored, after = reader.score(text, tree)
    path = torch.tensor([[place + 1 if place < count else -1 for place in range(3)] for count in kept])
    verdict = Verdict(path, torch.tensor(kept), torch.tensor([13, 17]))
    step = Step(text, tree, scored, scored.logits.softmax(-1), verdict)
    after = after.keep(text, verdict)
    grown = [[*row, *[7, 9, 11][:count], new] for row, count, new in zip(rows, kept, (13, 17), strict=True)]
    return step, after, grown


def test_a_rejection_costs_no_pass_and_long_replays_are_bounded() -> None:
    door = HuggingFaceModel(tiny("lfm2"))
    widths: list[int] = []
    plain = door.forward

    def watched(tokens: torch.Tensor, *given: Any, **named: Any) -> Any:
        widths.append(tokens.shape[1])
        return plain(tokens, *given, **named)

    door.forward = watched  # type: ignore[method-assign]
    reader: Any = reader_of(door, 1, 200)
    rows = [PROMPT[:11]]
    reader, _ = reader.catch_up(_text(rows))
    assert isinstance(reader, ChainReader) and widths == [10]
    seen: list[int] = []
    for _ in range(12):
        text, before = _text(rows), len(widths)
        shape_step = _alone(reader, text, rows, 1)
        reader, rows = shape_step
        seen.append(len(widths) - before)
    assert max(widths[1:]) <= 12 + 1 + 3 and 1 <= sum(one > 1 for one in seen) <= 2


def _alone(reader: Any, text: Text, rows: list[list[int]], kept: int) -> tuple[Any, list[list[int]]]:
    tokens = torch.tensor([[rows[0][-1], 7, 9, 11]])
    shape = TreeShape(((1,), (1,), (1,)))
    tree = TokenTree(tokens, topology(shape, 1, torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))
    _, after = reader.score(text, tree)
    path = torch.tensor([[place + 1 if place < kept else -1 for place in range(3)]])
    verdict = Verdict(path, torch.tensor([kept]), torch.tensor([13]))
    return after.keep(text, verdict), [[*rows[0], *[7, 9, 11][:kept], 13]]


def test_trees_become_chains_with_one_note() -> None:
    model, prompt = tiny("lfm2"), torch.tensor([PROMPT])
    with pytest.warns(
        UserWarning, match="Lfm2ForCausalLM scores chains only: drafts are chains of 3 instead of"
    ) as told:
        found = polydraft.generate(
            model, prompt, drafter=half_right("lfm2"), policy=Widths((3, 2, 1)), max_new_tokens=20, **GREEDY
        )
    assert len(told) == 1 and found.sequences[0, 24:].tolist() == theirs(model, PROMPT, 20)
    target = tiny_model("llama", 64).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = polydraft.generate(target, prompt, drafter=model, max_new_tokens=20, **GREEDY)  # nothing was asked for
        polydraft.generate(model, prompt, drafter=model, policy="auto", max_new_tokens=20, **GREEDY)
    assert found.sequences[0, 24:].tolist() == theirs(target, PROMPT, 20)
    with pytest.raises(InvalidParameter, match="the planner has trees that branch; give it chains"):
        polydraft.generate(
            model, prompt, drafter=model, policy=Planner([polydraft.Fixed(EAGLE_25)]), max_new_tokens=5, **GREEDY
        )


@pytest.mark.parametrize("name", ["mamba", "jamba"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_that_go_on_inexactly_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match="goes on from its states otherwise with several tokens than with one"):
        HuggingFaceModel(copy.deepcopy(tiny(name)).to(dtype))


@pytest.mark.parametrize("name", BOUNDED)
def test_models_that_bound_time_steps_with_several_tokens_only_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="bounds its time steps where it reads several tokens"):
        HuggingFaceModel(tiny(name))


@pytest.mark.parametrize("name", COUNTING)
def test_a_text_fills_the_context(name: str) -> None:
    """A chain that would reach beyond the table of positions is cut there."""
    length = {"bloom": {}, "mpt": {"max_seq_len": 40}, "gpt_neo": {"max_position_embeddings": 40}}[name]
    model = tiny(name, **length)
    drafter = ModelDrafter(HuggingFaceModel(model))
    found = polydraft.generate(
        model, torch.tensor([PROMPT[:10]]), drafter=drafter, policy=Chain(7), max_new_tokens=30, **GREEDY
    )
    assert found.sequences[0, 10:].tolist() == theirs(model, PROMPT[:10], 30)


def test_what_chains_cannot_do_is_refused_by_name() -> None:
    model = tiny("lfm2")
    with pytest.raises(InvalidParameter, match="Lfm2ForCausalLM scores chains only; leave compile out"):
        CompiledModel(model)
    door = HuggingFaceModel(model)
    for beside in (merge_beside(half_right("lfm2")), route_first(merge_beside(half_right("lfm2")))):
        with pytest.raises(UnsupportedModel, match=r"draft side by side in one tree; .* turns: route_first\(\.\.\.\)"):
            polydraft.generate(model, torch.tensor([PROMPT]), drafter=beside, max_new_tokens=4)
    found = polydraft.generate(
        model, torch.tensor([PROMPT]), drafter=route_first(half_right("lfm2")), max_new_tokens=20, **GREEDY
    )
    assert found.sequences[0, 24:].tolist() == theirs(model, PROMPT, 20)
    with pytest.raises(UnsupportedModel, match="Tuning searches trees, but Lfm2ForCausalLM scores chains only"):
        polydraft.tune(Pair(model, model, tiny_tokenizer()), [torch.tensor([PROMPT])])
    reader = reader_of(door, 1, 30)
    with pytest.raises(UnsupportedModel, match="cannot leave tokens of its text out"):
        reader.over(reader.cache, [0])
    with pytest.raises(UnsupportedModel, match="remembers in states, which a drafter cannot share"):
        reader.at(_text([PROMPT]))


@pytest.mark.parametrize("drafter", [half_right("lfm2"), ModelDrafter(HuggingFaceModel(tiny("lfm2")))])
def test_a_conversation_goes_on_from_its_past(drafter: ModelDrafter) -> None:
    """Also where the last chain, which the second drafter's target accepts whole, reached beyond the text's end."""
    model = tiny("lfm2")
    options: dict[str, Any] = {"drafter": drafter, "policy": Chain(3), "max_new_tokens": 11, **GREEDY}
    run = polydraft.stream(model, torch.tensor([PROMPT]), keep_past=True, **options)
    for _ in run:
        pass
    written = [*PROMPT, *run.new_tokens[0], 3, 4, 5]
    after = polydraft.generate(model, torch.tensor([written]), past=run.past, **options)
    assert after.sequences[0, len(written) :].tolist() == theirs(model, written, 11)
    assert after.statistics.prompt_known + after.statistics.prompt_read == len(written)
    assert len(PROMPT) - 1 <= after.statistics.prompt_known <= len(written) - 4
    other = [*PROMPT[:20], 7, 8]  # what was remembered reaches beyond the part that they share
    after = polydraft.generate(model, torch.tensor([other]), past=run.past, **options)
    assert after.sequences[0, len(other) :].tolist() == theirs(model, other, 11)
    assert after.statistics.prompt_known == 0


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "rwkv"])
def test_memory_counts_keys_and_states(name: str) -> None:
    door = HuggingFaceModel(tiny(name))
    reader, _ = reader_of(door, 1, 9).catch_up(_text([PROMPT[:5]]))
    cache: Any = reader.cache
    keys = sum(store.numel() * store.element_size() for store in cache.stores) * 9 // 10  # a slot is spare
    states = sum(one.numel() * one.element_size() for one in cache.states().tensors)
    assert cache_bytes(door, 9) == keys + states > 0


def test_states_are_rows_first_and_never_written_to() -> None:
    door = HuggingFaceModel(tiny("mamba2"))
    cache = door.new_cache(2, 8)
    assert cache.states() is None
    cache.begin(None)
    mask = torch.ones(2, 1, 1, dtype=torch.bool)
    zero = torch.zeros(2, dtype=torch.int64)
    door.forward(torch.tensor([[3], [4]]), zero.unsqueeze(-1), mask, cache, zero)
    states = cache.states()
    assert all(one.shape[0] == 2 for one in states.tensors)
    before = [one.clone() for one in states.tensors]
    cache.begin(states)
    door.forward(
        torch.tensor([[5], [6]]), zero.unsqueeze(-1) + 1, torch.ones(2, 1, 2, dtype=torch.bool), cache, zero + 1
    )
    assert all(torch.equal(one, other) for one, other in zip(states.tensors, before, strict=True))
    assert not math.isclose(float((cache.states().tensors[0] - before[0]).abs().sum()), 0)
    joined = states.joined(1, states.of_row(0))
    assert all(torch.equal(one[0], one[1]) for one in joined.tensors)
