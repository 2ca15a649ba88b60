"""LayerSkip's training against torchtune's formulas, what dropout does, and tuned models that are plain ones."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

import polydraft
from polydraft.cli.train import exits_in_words, run_train_exits
from polydraft.errors import InvalidParameter
from polydraft.options.commands.making_options import TrainExitsOptions
from polydraft.training import ExitPlan, ExitSettings, HeadRecipe, MadeExits, WritingPlan, make_exits
from polydraft.training.exits.exit_loss import SCALES, ExitQuality, ExitTraining
from polydraft.training.exits.exit_making import card_of
from polydraft.training.heads.losses.row_losses import HeadBatch

VOCAB, LAYERS, LENGTH = 24, 4, 14
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target(kind: str = "llama") -> PreTrainedModel:
    """Return a target whose output rows are its embeddings."""
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: dict[str, Any] = {"n_layer": LAYERS, **still} if kind == "gpt2" else {"num_hidden_layers": LAYERS}
    return tiny_model(kind, VOCAB, dtype=torch.float32, tie_word_embeddings=True, **sizes)


def texts() -> HeadBatch:
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    valid = torch.ones_like(ids)
    valid[0, :4] = valid[1, 11:] = 0
    nothing = torch.zeros(3, LENGTH, 1)
    return HeadBatch(ids, valid, nothing, nothing, nothing[..., 0])


# Torchtune's formulas, written again.


class TorchtuneCurriculum:
    """Its curricula as they go: `get` before a step, `step` behind it."""

    def __init__(self, kind: str, start: list[bool], most: int) -> None:
        self.kind, self.wanted, self.most, self.count = kind, [*start], most, 0
        self.now = [False] * len(start) if kind == "gradual" else [*start]

    def get(self) -> list[int]:
        return [layer for layer, there in enumerate([*self.now[:-1], True]) if there]

    def step(self) -> None:
        if self.kind == "rotational":
            self.now = [self.now[-1], *self.now[:-1]]
        elif self.kind == "gradual":
            n = len(self.now)
            done = [self.count / self.most >= 0.5 * (n - layer) / n for layer in range(n)]
            self.now = [a and b for a, b in zip(done, self.wanted, strict=True)]
        self.count += 1


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("layers", [1, 4, 14])
@pytest.mark.parametrize("kind", ["rotational", "gradual", "none"])
def test_curricula_are_torchtunes(kind: str, layers: int, every: int) -> None:
    steps, settings = 23, ExitSettings(curriculum=kind, every=every)
    theirs = TorchtuneCurriculum(kind, [layer % every == 0 for layer in range(layers)], steps)
    for step in range(steps):
        assert [*settings.exits(step, steps, layers)] == theirs.get()
        theirs.step()
    if kind == "gradual" and every == 1:
        assert len(settings.exits(steps // 2 + 2, steps, layers)) == layers, "all by half of the steps"


@pytest.mark.parametrize("early", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("scale", SCALES)
def test_weights_are_torchtunes(scale: str, early: float) -> None:
    for exits in ((0, 1, 2, 3), (0, 3), (3,), (1, 2, 3)):
        found, total = list[float](), 0
        for layer in exits:
            total += layer + 1
            own = {"sum": total, "linear": layer + 1, "sqrt": math.sqrt(layer + 1)}[scale]
            found.append(own * (early if layer < LAYERS - 1 else 1))
        wanted = [one / sum(found) for one in found]
        assert ExitSettings(scale=scale, early=early).weights(exits, LAYERS).tolist() == pytest.approx(wanted)


def test_probabilities_of_dropout_are_torchtunes() -> None:
    settings = ExitSettings(dropout=0.2)
    wanted = [0.2 * (math.exp(layer * math.log(2) / 13) - 1) for layer in range(14)]
    assert [settings.rate(layer, 14) for layer in range(14)] == pytest.approx(wanted)
    assert wanted[0] == 0 and settings.rate(13, 14) == pytest.approx(0.2) and settings.rate(0, 1) == 0.2


# The loss and the dropout.


def rows_by_hand(model: Any, ids: Tensor, layer: int) -> Tensor:
    """Return the rows behind a layer; Hugging Face hands out the last layer's states behind the norm."""
    states = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states[layer + 1]
    body = model.get_decoder()
    norm = body.norm if model.config.model_type != "gpt2" else body.ln_f
    return model.get_output_embeddings()(states if layer == LAYERS - 1 else norm(states))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_is_the_weighted_one_and_follows_the_curriculum(kind: str) -> None:
    settings = ExitSettings(dropout=0.0, scale="linear", early=0.5, curriculum="rotational", every=2)
    training, batch = ExitTraining(target(kind), settings), texts()
    training.begin(4)
    training.train()
    for step in range(4):
        exits = {0, 2, 3} if step % 2 == 0 else {1, 3}
        wanted, total = 0.0, 0.0
        for layer in sorted(exits):
            rows = rows_by_hand(target(kind), batch.ids, layer).detach()
            nats = [
                float(cross_entropy(rows[row, place], batch.ids[row, place + 1]))
                for row in range(3)
                for place in range(LENGTH - 1)
                if batch.valid[row, place + 1]
            ]
            weight = (layer + 1) * (0.5 if layer < 3 else 1)
            wanted, total = wanted + weight * sum(nats) / len(nats), total + weight
        assert float(training.learn(batch)["loss"].detach()) == pytest.approx(wanted / total, rel=1e-4)


def test_dropout_leaves_layers_out_of_some_texts_while_the_model_learns() -> None:
    """What comes out of a layer that is left out is what went in; every text has its own choice."""
    settings = ExitSettings(dropout=0.9)
    training, ids = ExitTraining(target(), settings), texts().ids.repeat(40, 1)
    training.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        training.run(ids)
        left = [torch.isclose(training.seen[one], training.seen[one - 1]).all(-1).all(-1) for one in range(1, LAYERS)]
        for layer, one in enumerate(left, start=1):
            assert float(one.float().mean()) == pytest.approx(settings.rate(layer, LAYERS), abs=0.15)
        assert not torch.equal(left[0], left[1]) and not bool(torch.stack(left).all())
        training.eval()
        training.run(ids)
        assert not any(torch.isclose(training.seen[one], training.seen[one - 1]).all() for one in range(1, LAYERS))


def test_without_training_overlaps_and_the_whole_models_loss_are_told() -> None:
    training, batch = ExitTraining(target()), texts()
    with torch.no_grad():
        found = training.learn(batch)
        whole = rows_by_hand(target(), batch.ids, LAYERS - 1).softmax(-1)
        there = [(row, place) for row in range(3) for place in range(LENGTH - 1) if batch.valid[row, place + 1]]
        for layer in range(LAYERS - 1):
            rows = rows_by_hand(target(), batch.ids, layer).softmax(-1)
            values = [float(torch.minimum(rows[one], whole[one]).sum()) for one in there]
            assert float(found["overlap"][layer]) == pytest.approx(sum(values) / len(values), abs=1e-5)
        nats = [-float(whole[row, place, batch.ids[row, place + 1]].log()) for row, place in there]
    assert float(found["loss"]) == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert int(training.get_buffer("done")) == 0, "what is measured is no step"


def test_a_step_lowers_the_loss_tied_tables_are_one_and_the_target_stays() -> None:
    before = {name: value.clone() for name, value in target().state_dict().items()}
    training, batch = ExitTraining(target(), ExitSettings(dropout=0.0, curriculum="none")), texts()
    assert len([*training.parameters()]) == len([*target().parameters()]) and len(training.slow()) == 1
    training.train()
    loss = training.learn(batch)["loss"]
    loss.backward()
    with torch.no_grad():
        for value in training.parameters():
            assert value.grad is not None
            value.sub_(0.01 * value.grad / value.grad.norm())
        assert float(training.learn(batch)["loss"]) < float(loss)
    tuned = training.tuned()
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())
    with torch.no_grad():
        found = tuned(batch.ids).logits
        torch.testing.assert_close(found, training.eval().hidden[0](batch.ids, use_cache=False).logits)
        assert float((found - target()(batch.ids).logits).abs().max()) > 1e-3
    assert tuned.get_input_embeddings().weight is tuned.get_output_embeddings().weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dropout": 1.0}, r"dropout is a probability in \[0, 1\), but is 1.0"),
        ({"dropout": math.nan}, "but is nan"),
        ({"early": -1.0}, "early is a finite factor of 0 or more, but is -1.0"),
        ({"scale": "log"}, "scale is sum, linear, sqrt, not 'log'"),
        ({"curriculum": "random"}, "curriculum is rotational, gradual, none, not 'random'"),
        ({"every": 0}, "every must be at least 1, but is 0"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        ExitSettings(**settings)


# Runs.


PLAN = ExitPlan(
    ExitSettings(every=2),
    WritingPlan(tokens=200, length=32, rows=4),
    HeadRecipe(steps=3, texts=4, matrix_rate=0.01, other_rate=0.005, measure_every=2, save_every=2),
    "a small target",
)


def test_a_tuned_folder_is_a_plain_model_and_says_that_it_is_another_one(tmp_path: Path) -> None:
    made = make_exits(target(), PROMPTS, tmp_path / "work", tmp_path / "tuned", PLAN)
    card = (tmp_path / "tuned" / "README.md").read_text()
    said = exits_in_words(made)
    assert "This is another model than a small target." in card and "another model than a small target" in said
    for part in (f"{made.before.perplexity:.3f}", f"{made.after.perplexity:.3f}", f"{made.after.overlap[1]:.3f}"):
        assert part in card and part in said
    assert made.as_dict()["another_model"] and len(made.after.overlap) == LAYERS - 1
    assert made.after != made.before and card == card_of(made, PLAN, 256)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert type(tuned) is type(target()) and (tmp_path / "tuned" / "model.safetensors").is_file()
    with torch.no_grad():
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        assert float((tuned(ids).logits - target()(ids).logits).abs().max()) > 1e-3
    plain: Any = polydraft.generate(tuned, ids, drafter="none", max_new_tokens=8, do_sample=False)
    assert torch.equal(plain.sequences, tuned.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_an_interrupted_run_goes_on_and_comes_to_the_same_model(tmp_path: Path) -> None:
    """Layers are left out of the same texts, and the curriculum is where it was."""
    whole = make_exits(target(), PROMPTS, tmp_path / "whole", tmp_path / "one", PLAN)
    looks = list[int]()

    def at_once() -> bool:
        looks.append(1)
        return len(looks) == 2

    with pytest.raises(KeyboardInterrupt):
        make_exits(target(), PROMPTS, tmp_path / "cut", tmp_path / "never", PLAN, lambda: nullcontext(at_once))
    assert (tmp_path / "cut" / PLAN.run_name / "checkpoint-2").is_dir() and not (tmp_path / "never").exists()
    again = make_exits(target(), PROMPTS, tmp_path / "cut", tmp_path / "two", PLAN)
    assert again.after.overlap == pytest.approx(whole.after.overlap, abs=1e-6)
    assert again.after.perplexity == pytest.approx(whole.after.perplexity, rel=1e-6)
    other = replace(PLAN, settings=ExitSettings(every=3))
    assert other.run_name != PLAN.run_name


def test_the_command_says_that_it_makes_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a = 1", "b = 2")))
    given = list[ExitPlan]()

    def make(model: Any, prompts: Any, work: Path, out: Path, plan: ExitPlan, noting: Any) -> Any:
        given.append(plan)
        quality = ExitQuality(2.0, (0.25, 0.5), 64)
        return MadeExits(out, plan.name, quality, quality, 1.0)

    monkeypatch.setattr("polydraft.cli.train.make_exits", make)
    folders = {"work": tmp_path / "work", "out": tmp_path / "out"}
    options = TrainExitsOptions(prompts=(str(tmp_path / "rows.jsonl"),), curriculum="gradual", every=2, **folders)
    assert run_train_exits(options) == 0
    said = capsys.readouterr()
    assert "The tuned model will be another one than the embedded target, which stays." in said.err
    assert "another model than the embedded target" in " ".join(said.out.split())
    assert given[0].settings == ExitSettings(curriculum="gradual", every=2) and given[0].recipe.matrix_rate == 0.001
    assert run_train_exits(replace(options, as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["another_model"] is True
