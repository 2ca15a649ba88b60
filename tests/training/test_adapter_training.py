"""Training Kangaroo's adapter: its loss by hand, what it is told of its layer, runs that go on, and the command."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from polydraft.cli.train import run_train_adapter
from polydraft.drafters import AdapterDrafter, load_head
from polydraft.drafters.heads.sublayers import Rotation
from polydraft.errors import InvalidParameter
from polydraft.options.commands.making_options import TrainAdapterOptions
from polydraft.training import MAKERS, HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head
from polydraft.training.heads.losses.row_losses import TargetEnds

VOCAB, LENGTH = 24, 13
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


def texts() -> tuple[Any, Any, dict[str, Any]]:
    """Return two texts as shards give them, with what the target made of them."""
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = target()(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, :4] = valid[1, 9:] = 0
    states = out.hidden_states
    given = {"ids": ids, "valid": valid, "features": states[2], "final": states[-1], "lse": out.logits.logsumexp(-1)}
    return ids, out, given


def training_of(loss: str = "published", exit_layer: int = 2) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        size = HeadSize(loss=loss, drafts=3)
        return MAKERS["adapter"].make(target(), TargetEnds.of(target()), (exit_layer,), size, None)


def test_the_loss_is_the_soft_cross_entropy_of_the_rows() -> None:
    """A row depends on the text up to its place alone, so each is made of a text that ends there."""
    made, (_, out, given) = training_of(), texts()
    costs, shared = list[float](), list[float]()
    with torch.no_grad():
        found = made.training(**given)
        for row in range(2):
            for place in range(LENGTH - 1):
                if given["valid"][row, place + 1]:
                    states = given["features"][row : row + 1, : place + 1]
                    own = made.training.logits(states)[0, -1].double().log_softmax(-1)
                    law = out.logits[row, place].double().softmax(-1)
                    costs.append(-float((law * own).sum()))
                    shared.append(float(torch.minimum(law, own.exp()).sum()))
    assert float(found["loss"]) == pytest.approx(sum(costs) / len(costs), rel=1e-5)
    assert found["overlap"].tolist() == pytest.approx([sum(shared) / len(shared)] * 3, abs=1e-5)
    assert found["count"].tolist() == [len(costs)] * 3


def test_a_step_lowers_the_loss_and_the_target_stays() -> None:
    made, (_, _, given) = training_of(), texts()
    before = {name: value.clone() for name, value in target().state_dict().items()}
    loss = made.training(**given)["loss"]
    loss.backward()
    with torch.no_grad():
        for value in made.training.parameters():
            assert value.grad is not None and bool(value.grad.any())
            value.sub_(0.05 * value.grad / value.grad.norm())
        assert float(made.training(**given)["loss"]) < float(loss)
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())


def test_a_new_adapter_has_the_targets_last_norm_and_the_authors_rotation() -> None:
    network = training_of().drafter.network
    assert torch.equal(network.norm.weight, target().model.norm.weight)  # type: ignore[operator, union-attr]
    assert network.anatomy.rotation == Rotation() and network.anatomy.width == 16


def plan(**changes: Any) -> HeadPlan:
    recipe = HeadRecipe(steps=3, texts=4, measure_every=2, save_every=2)
    size = {"drafts": 2, **changes.pop("size", {})}
    return HeadPlan("adapter", HeadSize(**size), WritingPlan(tokens=200, length=32, rows=4), recipe, **changes)


def test_it_stands_behind_the_layer_that_is_named(tmp_path: Path) -> None:
    for exit_layer, wanted in ((None, 1), (1, 1), (2, 2)):
        work, out = tmp_path / f"work {exit_layer}", tmp_path / f"out {exit_layer}"
        make_head(target(), PROMPTS, work, out, plan(size={"exit": exit_layer}))
        found = load_head(out)
        assert isinstance(found, AdapterDrafter) and found.exit_layer == wanted
        states = load_file(work / "text" / "held-00000.safetensors")
        with torch.no_grad():
            own = target()(states["ids"].long(), output_hidden_states=True).hidden_states[wanted]
        torch.testing.assert_close(states["features"][..., :16].float(), own, atol=0.05, rtol=0.02)
    again = make_head(target(), PROMPTS, tmp_path / "work 1", tmp_path / "two", plan(start=tmp_path / "out 1"))
    assert load_head(again.folder).needs.layers == (1,)


@pytest.mark.parametrize("exit_layer", [3, 7])
def test_a_layer_that_the_target_has_not_is_refused_before_it_writes(exit_layer: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=f"stands behind 1 to 2 layers of this target, not {exit_layer}"):
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "out", plan(size={"exit": exit_layer}))
    assert not (tmp_path / "work").exists()


def test_other_heads_have_no_exit() -> None:
    with pytest.raises(InvalidParameter, match="kind medusa has no exit; that is of adapter"):
        HeadPlan("medusa", HeadSize(exit=2))
    with pytest.raises(InvalidParameter, match="exit must be at least 1, but is 0"):
        HeadSize(exit=0)


def test_an_interrupted_run_goes_on_and_comes_to_the_same_adapter(tmp_path: Path) -> None:
    whole = make_head(target(), PROMPTS, tmp_path / "whole", tmp_path / "one", plan())
    with pytest.raises(KeyboardInterrupt):
        make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "no", plan(), lambda: nullcontext(lambda: True))
    again = make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "two", plan())
    assert again.drafting.overlap == pytest.approx(whole.drafting.overlap, abs=1e-6)


def test_the_command_is_train_head_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr("polydraft.cli.train.run_train_head", lambda request: asked.append(request) or 0)
    options = TrainAdapterOptions(prompts=("python",), exit=3, steps=7, out=tmp_path, loss="lk-alpha")
    assert run_train_adapter(options) == 0
    (found,) = asked
    assert (found.kind, found.exit, found.steps, found.out, found.loss) == ("adapter", 3, 7, tmp_path, "lk-alpha")
