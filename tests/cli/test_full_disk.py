"""`polydraft generate` with a store on a disk without room: the text comes, and one sentence says what is lost."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from polydraft.cli.commands import app
from polydraft.cli.process import exit_code_of
from polydraft.drafters import TextStore


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def generated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command as its process does."""
    command = ["polydraft", "generate", "def f(", "--drafter", f"suffix:{folder}", "--max-new-tokens", "8", "--quiet"]
    monkeypatch.setattr(sys, "argv", command)
    return exit_code_of(lambda: app(standalone_mode=False))


@pytest.mark.long(1)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lacks", ["fsync", "mkdir"])
def test_one_sentence_says_that_texts_are_not_kept(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generated(tmp_path / "roomy", monkeypatch) == 0
    plain, said = capfd.readouterr()
    assert not said and TextStore(tmp_path / "roomy").texts == 1, "it is written before the process ends"
    with monkeypatch.context() as patched:
        patched.setattr(os, lacks, full)
        assert generated(tmp_path / "store", patched) == 0
    out, said = capfd.readouterr()
    told = f"The store {tmp_path / 'store'} cannot be written (No space left on device); texts are not kept in it."
    assert out == plain and said == f"polydraft: {told}\n"
    assert not [*tmp_path.glob("store/*.segment")]
