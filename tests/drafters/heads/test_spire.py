"""SPIRe's draft: rows of trees by hand, the target without its other layers, texts, folders, and what it learns."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import spire_drafter
from safetensors.torch import load_file
from test_eagle import ANATOMY, PROMPTS, VOCAB, begun, part, plain_layer, randomly, rms, rows_below, text_of
from test_falcon import changed, check_chunks, check_greedy, check_steps, tree_logits
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import BestFirst, Chain, Widths
from polydraft.drafters import load_head
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.drafters.heads.formats.spire_folders import write_spire
from polydraft.drafters.itself.spire import SpireHead
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch, UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.training.heads.losses.eagles import EagleLoss, MtpTraining
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.pruning import pruned
from polydraft.trees import TreePolicy

VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {"sinks": 2, "window": 3},
    "one sink": {"sinks": 1, "window": 1},
    "wide": {"sinks": 4, "window": 60},
    "all keys": {"window": None},
    "no feedback": {"sinks": 2, "window": 3, "feedback": False},
}
PATHS = [(5, 7, 2, 4), (5, 7, 9, 1), (8, 1, 2, 4)]
LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


def drafter_of(name: str) -> HeadDrafter[SpireHead]:
    head = SpireHead(ANATOMY, 2, **VARIANTS[name])
    randomly(head)
    return HeadDrafter(head.double().eval(), HeadEnds())


# The formula, written again.


def path_row(target: Any, drafter: Any, text: Sequence[int], path: Sequence[int], swap: str = "") -> Tensor:
    """Return the logits behind a path's last token: all tokens of text and path at once, again for every draft."""
    head, weights = drafter.network, dict(drafter.network.named_parameters())
    table, rows = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    final = target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states[-1][0]
    past = [torch.zeros(16).double(), *final[:-1]]
    past = [*final] if swap == "own state" else past
    root, made = len(text) - 1, torch.zeros(0)
    for depth in range(len(path) + 1):
        tokens = [*text, *path[:depth]]
        order = torch.arange(len(tokens))
        away = order.unsqueeze(-1) - order
        window = 10**9 if head.window is None else head.window + (swap == "wider")
        sees = (away >= 0) & ((order < head.sinks) | (away < window) | (order > root))
        x = table[tokens]
        if head.feedback is not None:
            x = x + torch.stack(past) @ weights["feedback.weight"].T
        for layer in range(head.depth):
            x = plain_layer(x, part(weights, f"layers.{layer}."), order, sees)
        made = rms(x, weights["norm.weight"])[-1]
        past = [*past, x[-1] if swap == "recycled before the norm" else made]
    return made @ rows.T


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_rows_of_trees_are_those_of_the_formula(name: str, target: PreTrainedModel) -> None:
    drafter, rows = drafter_of(name), [LONG, *PROMPTS]
    state, _ = begun(drafter, target, rows)
    for path, logits in tree_logits(drafter, state, rows, PATHS).items():
        for row, text in enumerate(rows):
            wanted = path_row(target, drafter, text, path)
            torch.testing.assert_close(logits[row].double(), wanted, atol=1e-5, rtol=1e-5)  # angles in float32


@pytest.mark.parametrize("swap", ["own state", "wider", "recycled before the norm"])
@torch.no_grad()
def test_a_detail_done_otherwise_gives_other_rows(swap: str, target: PreTrainedModel) -> None:
    drafter, path = drafter_of("usual"), PATHS[0]
    found = tree_logits(drafter, begun(drafter, target, [LONG])[0], [LONG], PATHS)[path][0]
    assert float((found - path_row(target, drafter, LONG, path, swap)).abs().max()) > 1e-3


def test_few_keys_are_read_however_long_the_text_is(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seen = drafter_of("usual"), list[int]()
    state, _ = begun(drafter, target, [LONG * 2])
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(queries: Tensor, keys: Tensor, values: Tensor, **named: Any) -> Tensor:
        seen.append(keys.shape[2])
        return attend(queries, keys, values, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    rows_below(drafter, state, text_of([LONG * 2]), [[5, 7, 1]])
    assert len(seen) == 4 * 2 and max(seen) <= 2 + 3 + 4


# Pruned initialisation.


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@torch.no_grad()
def test_all_layers_and_all_keys_without_feedback_are_the_target(kind: str) -> None:
    model: Any = (
        tiny_model(kind, VOCAB, num_hidden_layers=3, sliding_window=None)
        if kind == "mistral"
        else tiny_model(kind, VOCAB, num_hidden_layers=3)
    )
    drafter = HeadDrafter(pruned(model, 3, window=None, feedback=False).double().eval(), HeadEnds())
    rows = [*PROMPTS]
    state, _ = begun(drafter, model, rows)
    for path, logits in tree_logits(drafter, state, rows, PATHS).items():
        for row, text in enumerate(rows):
            wanted = model(torch.tensor([[*text, *path]])).logits[0, -1]
            torch.testing.assert_close(logits[row].double(), wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_every_third_layer_is_taken_and_feedback_begins_as_nothing() -> None:
    model: Any = tiny_model("llama", VOCAB, num_hidden_layers=7)
    head = pruned(model)
    assert head.depth == 3 and (head.sinks, head.window) == (4, 60) and not head.feedback.weight.any()  # type: ignore[union-attr]
    for number, own in enumerate((0, 2, 4)):
        for name, value in model.model.layers[own].state_dict().items():
            assert torch.equal(head.layers[number].state_dict()[name], value.float())
    fresh = pruned(model, begun=False)
    assert not torch.equal(fresh.layers[0].mlp.up_proj.weight, head.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr]
    assert pruned(tiny_model("llama", VOCAB, num_hidden_layers=6)).depth == 2


def test_targets_of_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="No head can begin as layers of GPT2LMHeadModel"):
        pruned(tiny_model("gpt2", VOCAB))
    with pytest.raises(UnsupportedModel, match="4 layers cannot begin as layers of LlamaForCausalLM, which has 2"):
        pruned(tiny_model("llama", VOCAB), 4)
    strange = tiny_model("llama", VOCAB, num_hidden_layers=3)
    strange.config.rope_parameters["rope_theta"] = 12.0  # no longer what its layers turn with
    with pytest.raises(UnsupportedModel, match="they are not of Llama's or Qwen's kind"):
        pruned(strange)


# Texts.


@pytest.mark.parametrize("name", ["usual", "one sink"])
@pytest.mark.parametrize("at_once", [512, 2])
def test_prompts_in_chunks_are_prompts(
    name: str, at_once: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks(drafter_of(name), target, [LONG, *PROMPTS], at_once, monkeypatch)


@pytest.mark.parametrize("policy", [Widths((3, 2, 1)), BestFirst(9), Chain(6)], ids=repr)
@pytest.mark.parametrize("name", ["usual", "all keys"])
def test_steps_leave_what_a_fresh_start_makes(name: str, policy: TreePolicy, target: PreTrainedModel) -> None:
    check_steps(drafter_of(name), target, policy)


@pytest.mark.long(2)
@pytest.mark.parametrize("policy", [None, Widths((3, 2, 1)), BestFirst(9), Chain(5)], ids=repr)
@pytest.mark.parametrize("name", ["usual", "no feedback"])
def test_greedy_text_is_the_models(name: str, policy: TreePolicy | None, target: PreTrainedModel) -> None:
    check_greedy(drafter_of(name), target, policy)


# Folders.


def written(folder: Path, target: PreTrainedModel, **changes: Any) -> HeadDrafter[SpireHead]:
    drafter = spire_drafter(**changes)
    write_spire(drafter, folder, HuggingFaceModel(target))
    return drafter


@pytest.mark.parametrize("changes", [{}, {"window": None}, {"feedback": False}], ids=str)
def test_folders_are_told_and_read_again_bit_for_bit(
    changes: dict[str, Any], tmp_path: Path, target: PreTrainedModel
) -> None:
    drafter = written(tmp_path, target, **changes)
    config, held = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert [one.name for one in KINDS if one.told(config)] == ["SPIRe"]
    shapes = {name: tuple(one.shape) for name, one in held.items()}
    assert [one.name for one in KINDS if one.holds(shapes)] == (["SPIRe"] if changes != {"feedback": False} else [])
    found: Any = load_head(tmp_path)
    assert (found.network.sinks, found.network.window) == (drafter.network.sinks, drafter.network.window)
    own = {name: value.bfloat16().float() for name, value in drafter.network.state_dict().items()}
    assert own.keys() == held.keys() == found.network.state_dict().keys()
    assert all(torch.equal(found.network.state_dict()[name], value) for name, value in own.items())
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain: Any = polydraft.generate(target, PROMPTS[0], drafter="none", **given)
    text: Any = polydraft.generate(target, PROMPTS[0], drafter=str(tmp_path), **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted


def test_some_of_the_targets_tokens_may_be_drafted(tmp_path: Path, target: PreTrainedModel) -> None:
    tokens = torch.tensor([0, 1, 3, 4, 5, 9, 20])
    write_spire(HeadDrafter(spire_drafter().network, HeadEnds(tokens=tokens)), tmp_path, HuggingFaceModel(target))
    found: Any = load_head(tmp_path)
    assert torch.equal(found.ends.tokens, tokens)


DAMAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no sinks": ("", {"attention_sinks": "-"}, "attention_sinks is None; it must be a number"),
    "no window": ("", {"attention_window": 0}, "attention_window is 0; it must be a number"),
    "no answer": ("", {"feedback": "yes"}, "feedback is 'yes'; it must be true or false"),
    "feedback that is not wanted": ("", {"feedback": False}, "holds feedback.weight, which this kind of head does not"),
    "feedback that is missing": ("feedback.weight", {}, "feedback.weight is missing"),
    "no last norm": ("norm.weight", {}, "norm.weight is missing"),
    "more layers": ("", {"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
    "fewer layers": ("", {"num_hidden_layers": 1}, "holds layers.1.input_layernorm.weight and"),
    "another width": ("", {"intermediate_size": 12}, r"layers.0.mlp.gate_proj.weight has shape \[24, 16\]"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path, target: PreTrainedModel) -> None:
    drop, config, said = DAMAGED[case]
    written(tmp_path, target)
    changed(tmp_path, drop, **config)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_head(tmp_path)
    assert str(caught.value).count(". ") == 0


def test_what_cannot_be_is_refused(tmp_path: Path, target: PreTrainedModel) -> None:
    for changes, said in (({"sinks": 0}, "sinks must be .* at least 1, but is 0"), ({"window": 0}, "window must be")):
        with pytest.raises(InvalidParameter, match=said):
            SpireHead(ANATOMY, 1, **changes)
    written(tmp_path, target)
    with pytest.raises(TargetMismatch, match="reads states 16 wide and the target's are 32"):
        wide = tiny_model("llama", VOCAB, num_hidden_layers=3, hidden_size=32)
        polydraft.generate(wide, PROMPTS[0], drafter=load_head(tmp_path), max_new_tokens=2)


# What it learns.


@torch.no_grad()
def test_passes_are_what_is_drafted(target: PreTrainedModel) -> None:
    """Index i of pass j is the node at depth j below the root t_i, on the path of the text's own tokens."""
    drafter = drafter_of("usual")
    model = tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)
    ids = torch.tensor([LONG[:13]])
    out = model(ids, output_hidden_states=True)
    drafter.network.float()
    training = MtpTraining(drafter.network, TargetEnds.of(model), 3, EagleLoss("entropy"))
    found = training(ids, torch.ones_like(ids), out.hidden_states[-1], out.hidden_states[-1], out.logits.logsumexp(-1))
    assert found["count"].tolist() == [12, 11, 10]
    drafter.network.double()
    losses = list[float]()
    for depth in range(3):
        both, costs = list[Tensor](), list[Tensor]()
        for root in range(12 - depth):
            row = path_row(target, drafter, LONG[: root + 1], LONG[root + 1 : root + 1 + depth]).log_softmax(-1)
            law = out.logits[0, root + depth].double().softmax(-1)
            both.append(torch.minimum(row.exp(), law).sum())
            costs.append(-(law * row).sum())
        assert float(found["overlap"][depth]) == pytest.approx(float(torch.stack(both).mean()), abs=1e-4)
        losses.append(float(torch.stack(costs).mean()))
    weights = [0.8**depth for depth in range(3)]
    wanted = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
    assert float(found["loss"]) == pytest.approx(wanted, rel=1e-4)


def test_a_step_lowers_the_loss_and_reaches_everything() -> None:
    model = tiny_model("llama", VOCAB, num_hidden_layers=6, dtype=torch.float32)
    ids = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    batch = ids, torch.ones_like(ids), out.hidden_states[-1], out.hidden_states[-1], out.logits.logsumexp(-1)
    training = MtpTraining(pruned(model, window=4), TargetEnds.of(model), 2, EagleLoss("entropy"))
    before = training(*batch)["loss"]
    before.backward()
    assert all(value.grad is not None and bool(value.grad.any()) for value in training.parameters())
    with torch.no_grad():
        for value in training.parameters():
            value.sub_(0.01 * value.grad / value.grad.norm())  # type: ignore[operator, union-attr]
        assert float(training(*batch)["loss"]) < float(before)
