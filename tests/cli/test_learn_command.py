"""`polydraft learn show`, `pin` and `forget`."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polydraft.cli.commands import app
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.models.checkpoints import weight_versions
from polydraft.models.checkpoints.weight_versions import VersionFolder


def call(*arguments: object) -> tuple[int, str]:
    given = ["learn", *map(str, arguments)]
    ended = CliRunner().invoke(app, given, catch_exceptions=False, standalone_mode=False)
    return ended.return_value or ended.exit_code, ended.stdout


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    found = VersionFolder(tmp_path)
    found.check_origin("aa", "bb")
    for look in (3, 8):
        facts = {"look": look, "saving": 0.0321, "error": 0.004, "held_out_texts": 250, "held_out_tokens": 41_000}
        version = found.add({"weights": torch.full((2,), float(look))}, {**facts, "parent": "", "lessons": 1900})
        found.use(version.name, look, "")
    return found


def test_versions_are_shown_with_what_they_saved(folder: VersionFolder) -> None:
    new, old = folder.versions()
    code, said = call("show", folder.path)
    assert code == 0 and f"drafts come from version {new.name}, after 8 comparisons." in " ".join(said.split())
    assert all(part in said for part in (new.name, old.name, "3.21%", "0.40%", "41,000", "1,900 texts", "yes"))
    told = json.loads(call("show", folder.path, "--json")[1])
    assert (told["in_use"], told["look"], told["pinned"]) == (new.name, 8, False)
    assert [one["version"] for one in told["versions"]] == [new.name, old.name]


def test_a_version_is_pinned_by_its_number_and_let_go(folder: VersionFolder) -> None:
    _, old = folder.versions()
    for version, name in ((1, old.name), (old.name, old.name), (0, None)):
        told = json.loads(call("pin", folder.path, version, "--json")[1])
        assert (told["in_use"], told["pinned"], told["look"]) == (name, True, 8)
    assert "the weights before all learning, after 8 comparisons; this is pinned" in call("show", folder.path)[1]
    assert not json.loads(call("pin", folder.path, "newest", "--json")[1])["pinned"]
    with pytest.raises(InvalidParameter, match=r"VERSION is '9', but .* name one of these"):
        call("pin", folder.path, "9")


def test_everything_is_forgotten(folder: VersionFolder) -> None:
    assert "2 versions were dropped" in call("forget", folder.path)[1]
    assert not folder.versions() and folder.in_use().look == 0 and folder.mark()
    assert json.loads(call("forget", folder.path, "--json")[1])["forgotten"] == 0
    assert "the weights before all learning, after 0 comparisons." in " ".join(call("show", folder.path)[1].split())


@pytest.mark.parametrize("command", [("show",), ("forget",), ("pin", "1")])
def test_a_folder_of_something_else_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="holds nothing that was learnt: name the folder of"):
        call(command[0], tmp_path, *command[1:])
    assert not [*tmp_path.iterdir()], "and nothing is written there"


def test_a_folder_that_cannot_be_changed_is_said(folder: VersionFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_versions, "_write_whole", full)
    for command in (("forget",), ("pin", "1")):
        with pytest.raises(ResultsError, match="cannot be changed: No space left on device"):
            call(command[0], folder.path, *command[1:])
