"""`polydraft completion`: what each shell is given, and what a shell is told at a TAB."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_start_up import loaded_by
from typer.testing import CliRunner

from polydraft.catalogue import drafter_words, example_trees, rule_words
from polydraft.cli.commands import app

SHELLS = ("bash", "zsh", "fish", "powershell")
START = "import sys; from polydraft_command import main; sys.argv[0] = 'polydraft'; main()"


def script(shell: str) -> str:
    ended = CliRunner().invoke(app, ["completion", shell], catch_exceptions=False, standalone_mode=False)
    assert not ended.return_value
    return ended.stdout


def offered(line: str) -> list[str]:
    """Return what bash is told behind a line, as the command itself answers it."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_POLYDRAFT_COMPLETE": "complete_bash"}
    call = [sys.executable, "-c", START]
    return subprocess.run(call, env=os.environ | asked, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_asks_the_command_itself(shell: str) -> None:
    text = script(shell)
    assert "polydraft" in text and f"_POLYDRAFT_COMPLETE{' ' if shell == 'powershell' else ''}" in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("polydraft gen", ["generate"]),
        ("polydraft generate --drafter r", [word for word in drafter_words(1) if word.startswith("r")]),
        ("polydraft generate --verifier ", ["auto", *rule_words()]),
        ("polydraft generate --tree eag", [one for one in example_trees(growing=False) if one.startswith("eag")] + [
            one for one in example_trees(growing=True) if one.startswith("eag")
        ]),
        ("polydraft generate --weights i", ["int8", "int4"]),
        ("polydraft serve --drafter merge-", ["merge-beside"]),
        ("polydraft completion ", [*SHELLS]),
        ("polydraft fetch sp", ["spec-bench"]),
    ],
)  # fmt: skip
def test_commands_and_words_complete(line: str, expected: list[str]) -> None:
    assert len(expected) > 0 and offered(line) == expected


def test_options_complete_and_files_are_left_to_the_shell() -> None:
    assert {"--drafter", "--verifier", "--tree", "--target"} <= {*offered("polydraft generate --")}
    for command in ("bench", "limits"):
        assert {"--ray", "--address", "--replicas", "--threads"} <= {*offered(f"polydraft {command} --")}
    assert not any(offered("polydraft generate --target "))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    command = tmp_path / "polydraft"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{START}" "$@"\n')
    command.chmod(0o755)
    keys = "COMP_WORDS=(polydraft generate --drafter lookup); COMP_CWORD=3; _polydraft_completion polydraft"
    call = f'{script("bash")}\n{keys}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    told = subprocess.run(["bash", "-c", call], env=os.environ | path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["lookup-first"]


def test_another_shell_is_refused_by_the_names_of_those_that_are_known() -> None:
    call = [sys.executable, "-m", "polydraft", "completion", "tcsh"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and all(shell in ended.stderr for shell in SHELLS)


def test_neither_scripts_nor_answers_load_anything_heavy() -> None:
    completed = (
        "import os, sys\nsys.argv = ['polydraft']\n"
        "os.environ |= {'_POLYDRAFT_COMPLETE': 'complete_bash', 'COMP_WORDS': 'polydraft chat --drafter ', "
        "'COMP_CWORD': '3'}\nfrom polydraft.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    assert loaded_by(completed) == []
