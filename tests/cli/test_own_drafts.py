"""What a target's own folder drafts with, by every command: heads and masks inside are found, modules are told of."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from polydraft.cli import main
from polydraft.drafters import HeadDrafter, RiderDrafter
from polydraft.drafters.heads.formats.last_state_folders import medusa_inside
from polydraft.server import Settings
from polydraft.server.worker.served import load_served
from polydraft.training.heads.losses.last_state_training import new_heads
from polydraft.training.heads.losses.row_losses import TargetEnds

TOLD = "has MTP modules, which draft for it if the draft is 'mtp'."
SHORT = ("--max-new-tokens", "6")


def plain(folder: Path) -> None:
    """Leave a folder as it is."""


def with_modules(folder: Path) -> None:
    """Let a folder promise one module, and hold a tensor of it."""
    changed(folder, {"model.mtp_layers.0.input_proj.weight": torch.ones(2)}, num_nextn_predict_layers=1)


def with_heads(folder: Path) -> None:
    """Put Medusa's heads into a model, as one that was tuned with them has them."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings, tensors = medusa_inside(new_heads(TargetEnds.of(target), 2, own_rows=True))
    changed(folder, {name: value.detach().clone() for name, value in tensors.items()}, **settings)


def with_masks(folder: Path) -> None:
    """Name a mask, as a model does that was tuned to fill it in."""
    changed(folder, {}, spd_type="space", mask_token_id=5, mask_num=2)


def changed(folder: Path, tensors: dict[str, Tensor], **config: object) -> None:
    file, said = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    said.write_text(json.dumps({**json.loads(said.read_text()), **config}))


COMMANDS = {
    "generate": ("generate", "How many?", "--drafter", "model", *SHORT),
    "chat": ("chat", "--drafter", "model", *SHORT),
    "bench": ("bench", "--prompts", "one.jsonl", "--temperature", "0", "--arm", "drafter=model tree=chain:2", *SHORT),
}
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"id": "a", "text": "How many?"}\n')

    def run(command: str, target: Path, *, drafts: bool = True) -> tuple[int, str]:
        name, *words = COMMANDS[command]
        given = words if drafts else [one for one in words if one not in ("--drafter", "model")]
        given = given if drafts else [one.replace("drafter=model tree=chain:2", "default") for one in given]
        monkeypatch.setattr(sys, "argv", ["polydraft", name, "--target", str(target), *given])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"How many?\n"), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def made(chat_folder: Path, tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    def make(change: Callable[[Path], None]) -> Path:
        folder = Path(shutil.copytree(chat_folder, tmp_path / change.__name__))
        change(folder)
        return folder

    return make


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tuned_target_alone_drafts_for_itself(command: str, call: Call, made: Callable[..., Path]) -> None:
    for change in (with_heads, with_masks):
        code, said = call(command, made(change))
        assert code == 0, said
    code, said = call(command, made(plain))
    assert code != 0 and "draft" in said, "another target has nothing to draft with"


@pytest.mark.parametrize(("change", "named"), [(with_heads, "its own head"), (with_masks, "its own masks")])
def test_results_name_what_drafts(
    change: Callable[[Path], None],
    named: str,
    made: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["polydraft", "generate", "How many?", "--target", str(made(change)), "--json", *SHORT]
    )
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["draft"] == named and found["statistics"]["drafted"] > 0


@pytest.mark.filterwarnings("default:.*does not draft from its own masks:UserWarning")
def test_masks_without_room_beside_a_text_leave_drafting_to_the_text(
    small_chat_folder: Path, call: Call, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_chat_folder, tmp_path / "small"))
    changed(folder, {}, spd_type="space", mask_token_id=5, mask_num=11)
    code, said = call("generate", folder, drafts=False)
    assert code == 0 and "does not draft from its own masks: they need 132 tokens" in said
    code, said = call("generate", folder)
    assert code != 0 and "--drafter model needs a draft model: give --draft." in said


def test_a_server_drafts_with_what_a_tuned_target_has(made: Callable[..., Path]) -> None:
    heads, masks, none = (
        load_served(Settings(target=str(made(change)))).draft for change in (with_heads, with_masks, plain)
    )
    assert isinstance(heads, HeadDrafter) and isinstance(masks, RiderDrafter) and masks.masks == (5, 5)
    assert none is None


@pytest.mark.filterwarnings(f"default:.*{TOLD}:UserWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_modules_that_nobody_asked_for_are_told_of(command: str, call: Call, made: Callable[..., Path]) -> None:
    code, said = call(command, made(with_modules), drafts=False)
    assert code == 0 and said.count(TOLD) == 1
    assert TOLD not in call(command, made(plain), drafts=False)[1]


def test_a_server_tells_of_modules_that_nobody_asked_for(made: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match=TOLD):
        assert load_served(Settings(target=str(made(with_modules)))).draft is None
