"""The commands of `lab/`: they join in a checkout, and an installed package says where they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polydraft

SOURCE = Path(polydraft.__file__).parents[1]
CALLS = ("limits", "bench passes", "bench rules", "bench planner", "bench lattice", "bench pipelines")
WHERE = (
    "is in the folder lab/ of the repository, not in the installed package: clone the repository and run `make env` "
    "there.\n"
)


def called(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command in a new process that finds the package in a folder."""
    code = "import sys; from polydraft_command import main; sys.argv[0] = 'polydraft'; main()"
    found = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "100"}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=found)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what a wheel installs, without anything of the repository beside it."""
    folder = tmp_path_factory.mktemp("environment") / "lib" / "site-packages"
    folder.mkdir(parents=True)
    for name in ("polydraft", "polydraft_command.py"):
        (folder / name).symlink_to(SOURCE / name)
    return folder


@pytest.mark.parametrize("call", CALLS)
def test_an_installed_package_says_in_one_sentence_where_a_command_is(installed: Path, call: str) -> None:
    ended = called(installed, *call.split(), "--temperature", "hot", "word", "--no-such-option")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"polydraft: `polydraft {call}` {WHERE}"


def test_help_of_an_installed_package_says_that_they_need_a_checkout(installed: Path) -> None:
    said = "only in a checkout of the repository"
    assert said in called(installed, "--help").stdout and said in called(installed, "limits", "--help").stdout
    assert called(installed, "bench", "--help").stdout.count(said) == 5
    assert called(installed, "bench", "pases").stderr.startswith("polydraft: No such command 'pases'. Did you mean")


@pytest.mark.long(2)
@pytest.mark.parametrize("call", CALLS)
def test_they_join_in_a_checkout(call: str) -> None:
    ended = called(SOURCE, *call.split(), "--help")
    assert ended.returncode == 0 and "--target" in ended.stdout and "checkout" not in ended.stdout
