"""CLLM: Jacobi's iteration over blocks, the loss of consistency against its formula, and what a run writes."""

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from families import built
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

import polydraft
from polydraft.cli.train import consistent_in_words, run_train_consistency
from polydraft.drafters import JacobiBlockDrafter, drafter_of
from polydraft.errors import InvalidParameter, UnsupportedModel, VocabularyMismatch
from polydraft.models.checks.supported import say_if_tuned
from polydraft.options.commands.making_options import TrainConsistencyOptions
from polydraft.training import (
    ConsistencyPlan,
    ConsistencySettings,
    HeadRecipe,
    MadeConsistent,
    WritingPlan,
    make_consistent,
)
from polydraft.training.consistency.consistency_loss import ConsistencyTraining, drawn_states
from polydraft.training.consistency.trajectories import (
    BlockReader,
    Convergence,
    answers_of,
    block_roots,
    convergence,
    jacobi_states,
    repeating,
)
from polydraft.training.heads.losses.row_losses import TargetEnds

VOCAB, LENGTH, BLOCK = 24, 20, 4
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target(kind: str = "llama", seed: int = 0) -> Any:
    if kind == "gemma2":  # its logits are capped: no product of states and a table
        return built(kind, {"final_logit_softcapping": 3.0}).float()
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if kind == "gpt2" else {}
    return tiny_model(kind, VOCAB, seed=seed, dtype=torch.float32, tie_word_embeddings=True, **still)


def random_ids(rows: int = 3) -> Tensor:
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def rows_of(model: PreTrainedModel, text: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([text])).logits[0]


def states_of(ids: Tensor, *, towards_text: bool, kind: str = "llama") -> Tensor:
    model = target(kind)
    reader = BlockReader(model, model.config.vocab_size)
    assert reader.splits is (kind != "gemma2")
    return jacobi_states(reader, ids, BLOCK, torch.Generator().manual_seed(5), towards_text=towards_text)


# The iteration.


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_states_follow_from_plain_passes_over_text_and_guesses(kind: str) -> None:
    ids = random_ids()
    own, towards = (states_of(ids, towards_text=one, kind=kind) for one in (False, True))
    roots, answers = block_roots(LENGTH, BLOCK), answers_of(ids, BLOCK)
    assert roots.tolist() == [3, 7, 11, 15] and answers[0, 3].tolist() == ids[0, 16:].tolist()
    assert torch.equal(own[:, :, 0], towards[:, :, 0])
    for row, block in ((0, 0), (1, 2), (2, 3)):
        text, answer = ids[row, : int(roots[block]) + 1].tolist(), answers[row, block].tolist()
        assert {*own[row, block, 0].tolist()} <= {*text}
        for states, given in ((own, None), (towards, answer)):
            for before, after in zip(states[row, block, :-1].tolist(), states[row, block, 1:].tolist(), strict=True):
                made = rows_of(target(kind), text + before)[len(text) - 1 : -1].argmax(-1).tolist()
                if given is not None:
                    made = [given[i] if before[:i] == given[:i] else one for i, one in enumerate(made)]
                assert after == made


def test_own_iteration_ends_in_greedy_text_and_the_other_in_any_text() -> None:
    ids = random_ids()
    assert torch.equal(states_of(ids, towards_text=True)[:, :, -1], answers_of(ids, BLOCK))
    last = states_of(ids, towards_text=False)[:, :, -1]
    greedy = target().generate(ids[:, :4], max_new_tokens=BLOCK, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(last[:, 0], greedy[:, 4:])
    written = target().generate(
        ids[:, :4], max_new_tokens=LENGTH - 4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(states_of(written, towards_text=True), states_of(written, towards_text=False))


def test_blocks_that_repeat_are_told() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 5, 6, 7, 7, 7, 7, 7, 7, 7, 8]])
    assert repeating(ids, 4).tolist() == [[True, False, False, False]]
    ids[0, 19] = 7
    assert repeating(ids, 4).tolist() == [[True, False, False, True]]
    assert repeating(torch.arange(20)[None], 4).any().item() is False


def test_passes_and_tokens_are_counted() -> None:
    """Three passes; the last token was right for good behind a wrong one, and one pass brought two tokens."""
    states = torch.tensor([[9, 9, 9, 4], [1, 9, 8, 4], [1, 2, 8, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    at_once = torch.tensor([[1, 2, 3, 4]] * 5)
    both = torch.stack([states, at_once, states[[0, 0, 1, 2, 3]]])[None]
    assert convergence(both, torch.tensor([[True, False, False]])) == Convergence(3.0, 1.0, 1.0, 1)
    assert convergence(both, torch.tensor([[False, True, False]])) == Convergence(0.0, 3.0, 0.0, 1)
    assert convergence(both, torch.tensor([[True, True, False]])) == Convergence(1.5, 2.0, 0.5, 2)
    assert convergence(both, torch.zeros(1, 3, dtype=torch.bool)).blocks == 0


# The loss.


def batch_of(ids: Tensor) -> dict[str, Tensor]:
    valid = torch.ones_like(ids)
    valid[0, :9] = valid[1, 17:] = 0
    states = target("llama", 7).get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    final = states.detach().bfloat16().float()
    guesses = states_of(ids, towards_text=True)[:, :, :-1]
    return {
        "ids": ids,
        "valid": valid,
        "features": torch.zeros(*ids.shape, 0),
        "final": final,
        "lse": torch.zeros(ids.shape),
        "guesses": guesses,
    }


@pytest.mark.parametrize("keep", ["tokens", "law"])
def test_the_loss_is_that_of_plain_passes(keep: str) -> None:
    """CLLM's loss written again from single passes, and its gradient by what is not fixed in it."""
    network = tiny_model("llama", VOCAB, seed=3, dtype=torch.float32).requires_grad_(True)
    ends = TargetEnds.of(target("llama", 7))
    settings = ConsistencySettings(BLOCK, keep, 3.0)
    training = ConsistencyTraining(network, VOCAB, settings, ends if keep == "law" else None)
    ids = random_ids()
    ids[2, 12:16] = ids[2, 8:12]  # a block that repeats
    batch = batch_of(ids)
    torch.manual_seed(11)
    found = training(**batch)
    torch.manual_seed(11)
    some, _ = drawn_states(batch["guesses"], answers_of(ids, BLOCK))
    consistency, on_text, counts = list[Tensor](), list[Tensor](), [0] * (BLOCK - 1)
    with torch.no_grad():
        laws = ends.output(batch["final"]).softmax(-1)
    for row, text in enumerate(ids.tolist()):
        plain = network(input_ids=ids[row : row + 1]).logits[0]
        for place in range(LENGTH - 1):
            if batch["valid"][row, place + 1]:
                law = laws[row, place]
                kl = (law * (law.log() - plain[place].log_softmax(-1))).sum()
                ce = cross_entropy(plain[place : place + 1], ids[row, place + 1 : place + 2], label_smoothing=0.1)
                on_text.append(ce if keep == "tokens" else kl)
        for block, root in enumerate(block_roots(LENGTH, BLOCK).tolist()):
            state = some[row, block].tolist()
            answer = text[root + 1 : root + 1 + BLOCK]
            first = next((i for i in range(BLOCK) if state[i] != answer[i]), BLOCK)
            if (row, block) == (2, 2):
                continue
            made = network(input_ids=torch.tensor([text[: root + 1] + state])).logits[0]
            for i in range(first, BLOCK - 1):
                if batch["valid"][row, root + 2 + i]:
                    label = plain[root + 1 + i].detach().softmax(-1) if keep == "tokens" else laws[row, root + 1 + i]
                    consistency.append(-(label * made[root + 1 + i].log_softmax(-1)).sum())
                    counts[i] += 1
    wanted = torch.stack(consistency).mean() + 3.0 * torch.stack(on_text).mean()
    assert float(found["loss"].detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert found["count"].tolist() == counts and min(counts) > 0
    found["loss"].backward()
    gradients = [one.grad.clone() for one in network.parameters() if one.grad is not None]
    network.zero_grad()
    wanted.backward()
    for one, parameter in zip(gradients, network.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(one, parameter.grad, atol=2e-5)


def test_states_are_drawn_from_those_that_are_not_the_end() -> None:
    answers = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    guesses = torch.tensor([[[[9, 9, 9], [1, 9, 9], [1, 2, 3]], [[4, 5, 6]] * 3]])
    torch.manual_seed(0)
    drawn = [drawn_states(guesses, answers) for _ in range(40)]
    assert {tuple(some[0, 0].tolist()) for some, _ in drawn} == {(9, 9, 9), (1, 9, 9)}
    assert {tuple(wrong[0, 0].tolist()) for some, wrong in drawn} == {(True,) * 3, (False, True, True)}
    assert not any(bool(wrong[0, 1].any()) for _, wrong in drawn)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block": 1}, "A block has 2 tokens or more, but 1"),
        ({"keep": "rows"}, "keep is tokens or law, not 'rows'"),
        ({"weight": -1.0}, "weight is a finite number of 0 or more, but is -1.0"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        ConsistencySettings(**settings)


# Runs.


PLAN = ConsistencyPlan(
    ConsistencySettings(BLOCK),
    WritingPlan(tokens=200, length=32, rows=4),
    HeadRecipe(steps=3, texts=4, matrix_rate=0.01, other_rate=0.005, measure_every=2, save_every=2),
    "a small target",
)


def test_a_tuned_folder_is_a_plain_model_that_says_it_is_another_one_and_drafts(tmp_path: Path) -> None:
    made = make_consistent(target(), PROMPTS, tmp_path / "work", tmp_path / "tuned", PLAN)
    card, said = (tmp_path / "tuned" / "README.md").read_text(), consistent_in_words(made)
    assert "This is another model than a small target." in card and "another model than a small target" in said
    assert str(made.drift) in card and str(made.drift) in said and f"{made.after.passes:.3f}" in card
    assert made.as_dict()["another_model"] and made.drift is not None and made.drift.divergence > 0
    tuned: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    with pytest.warns(UserWarning, match="is another model than 'a small target', whose weights were tuned"):
        say_if_tuned(tuned, "mine")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert float((tuned(ids).logits - target()(ids).logits).abs().max()) > 1e-3
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    plain = tuned.generate(ids, pad_token_id=0, **options)
    jacobi: Any = polydraft.generate(tuned, ids, drafter="jacobi", **options)
    assert torch.equal(jacobi.sequences, plain)
    own = drafter_of(tuned)
    assert isinstance(own, JacobiBlockDrafter) and own.block == BLOCK
    exact: Any = polydraft.generate(target(), ids, drafter=tuned, **options)
    assert torch.equal(exact.sequences, target().generate(ids, pad_token_id=0, **options))


def test_a_draft_learns_the_targets_law_and_stays_a_draft(tmp_path: Path) -> None:
    draft = tiny_model("llama", VOCAB, seed=5, dtype=torch.float32, num_hidden_layers=1)
    plan = replace(PLAN, settings=ConsistencySettings(BLOCK, "law"), recipe=replace(PLAN.recipe, steps=12))
    made = make_consistent(target(), PROMPTS, tmp_path / "work", tmp_path / "draft", plan, start=draft)
    assert made.draft and made.drift is None and not made.as_dict()["another_model"]
    assert made.overlap[1] > made.overlap[0] + 0.01
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "another model" not in card and "texts follow the law of a small target" in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    with warnings.catch_warnings(action="error"):
        say_if_tuned(model, "mine")
    own = drafter_of(model)
    assert isinstance(own, JacobiBlockDrafter)


def test_an_interrupted_run_goes_on_and_comes_to_the_same_model(tmp_path: Path) -> None:
    whole = make_consistent(target(), PROMPTS, tmp_path / "whole", tmp_path / "one", PLAN)
    looks = list[int]()

    def at_once() -> bool:
        looks.append(1)
        return len(looks) == 2

    with pytest.raises(KeyboardInterrupt):
        make_consistent(target(), PROMPTS, tmp_path / "cut", tmp_path / "never", PLAN, lambda: nullcontext(at_once))
    blocks, run = PLAN.folders(target())
    assert (tmp_path / "cut" / run / "checkpoint-2").is_dir() and not (tmp_path / "never").exists()
    (first, *_) = sorted((tmp_path / "cut" / blocks).iterdir())
    times = first.stat().st_mtime_ns
    again = make_consistent(target(), PROMPTS, tmp_path / "cut", tmp_path / "two", PLAN)
    assert again.overlap == pytest.approx(whole.overlap, abs=1e-6) and again.after == whole.after
    assert first.stat().st_mtime_ns == times, "trajectories are not made again"
    assert replace(PLAN, settings=ConsistencySettings(BLOCK, "law")).folders(target())[1] != run


WRONG: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], type[Exception], str]] = {
    "short": (target, {"settings": ConsistencySettings()}, InvalidParameter, "Blocks of 16 tokens need texts of 48"),
    "recurrent": (
        lambda: built("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "vocab_size": VOCAB}),
        {},
        UnsupportedModel,
        "Lfm2ForCausalLM cannot take back what it has read, so it cannot learn",
    ),
    "context": (
        lambda: tiny_model("llama", VOCAB, max_position_embeddings=31),
        {},
        InvalidParameter,
        "LlamaForCausalLM sees 31 tokens at once; ask for texts of at most as many, not 32",
    ),
    "window": (
        lambda: tiny_model("mistral", VOCAB, sliding_window=6),
        {},
        InvalidParameter,
        "MistralForCausalLM sees 6 tokens at once",
    ),
    "tokens": (lambda: tiny_model("llama", VOCAB + 2000), {}, VocabularyMismatch, "they do not share a tokenizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_learn_is_said_before_a_text(name: str, tmp_path: Path) -> None:
    start, changes, error, said = WRONG[name]
    with pytest.raises(error, match=said):
        make_consistent(target(), PROMPTS, tmp_path / "work", tmp_path / "out", replace(PLAN, **changes), start=start())
    assert not any(tmp_path.iterdir())


def test_rows_that_cannot_be_made_again_are_kept_by_tokens_alone(tmp_path: Path) -> None:
    capped = target("gemma2")
    plan = replace(PLAN, settings=ConsistencySettings(BLOCK, "law"))
    with pytest.raises(UnsupportedModel, match="are no product of its last states and a table; keep to tokens"):
        make_consistent(capped, PROMPTS, tmp_path / "work", tmp_path / "out", plan)
    assert not any(tmp_path.iterdir())
    made = make_consistent(capped, PROMPTS, tmp_path / "work", tmp_path / "out", PLAN)
    assert made.drift is not None and made.drift.divergence > 0


def test_a_draft_with_fewer_rows_than_the_target_has_tokens_learns_too(tmp_path: Path) -> None:
    draft = tiny_model("llama", VOCAB - 3, seed=5, dtype=torch.float32)
    plan = replace(PLAN, settings=ConsistencySettings(BLOCK, "law"))
    assert make_consistent(target(), PROMPTS, tmp_path / "work", tmp_path / "draft", plan, start=draft).draft


def test_the_command_says_that_it_makes_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a = 1", "b = 2")))
    given = list[tuple[ConsistencyPlan, Any]]()

    def make(model: Any, prompts: Any, work: Path, out: Path, plan: ConsistencyPlan, noting: Any, start: Any) -> Any:
        given.append((plan, start))
        some = Convergence(3.0, 1.0, 0.5, 8)
        return MadeConsistent(out, plan.name, start is not None, some, some, (0.2, 0.3), None, 0.0, 1.0)

    monkeypatch.setattr("polydraft.cli.train.make_consistent", make)
    folders: dict[str, Any] = {"work": tmp_path / "work", "out": tmp_path / "out"}
    options = TrainConsistencyOptions(prompts=(str(tmp_path / "rows.jsonl"),), block=8, **folders)
    assert run_train_consistency(options) == 0
    said = capsys.readouterr()
    assert "The tuned model will be another one than the embedded target, which stays." in said.err
    assert "another model than the embedded target" in " ".join(said.out.split())
    assert given[0][0].settings == ConsistencySettings(8) and given[0][1] is None
    assert run_train_consistency(replace(options, as_json=True, start="pair-draft")) == 0
    said = capsys.readouterr()
    assert "another" not in said.err and json.loads(said.out)["another_model"] is False
    assert given[1][0].settings.keep == "law" and given[1][1] is not None
