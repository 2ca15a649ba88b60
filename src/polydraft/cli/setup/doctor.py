"""`polydraft doctor`: what is installed, what this machine has, and what would fail or be slow; no model is loaded."""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polydraft import __version__
from polydraft.cli.printing import columns, named_values
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import FAILED
from polydraft.cli.setup.findings import FAILS, Finding, of_folders, of_machine, of_packages, of_variables
from polydraft.cli.setup.installed import ExtraState, PackageState, extra_states, package_states
from polydraft.cli.setup.kept_folders import KeptFolder, kept_folders
from polydraft.errors import PolydraftError, lowered
from polydraft.options.commands.setup_options import DoctorOptions

if TYPE_CHECKING:  # what looks at the machine imports torch, which may be what is broken
    from polydraft.cli.setup.machine_facts import MachineChoice, MachineFacts

T = TypeVar("T")
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT"),
    *("POLYDRAFT_CACHE", "POLYDRAFT_COPIED_MIB", "POLYDRAFT_DEBUG", "POLYDRAFT_MEASURE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
)
"""Environment variables that change what is used; none that holds a secret."""
NOT_INSTALLED = "polydraft is not installed, so that nothing says which packages it needs: pip install its folder."


@dataclass(frozen=True)
class Report:
    """What the doctor saw; of what could not be looked at there is nothing but a finding."""

    versions: dict[str, str]
    packages: tuple[PackageState, ...]
    extras: tuple[ExtraState, ...]
    machine: "MachineFacts | None"
    generate: "tuple[MachineChoice, ...]"
    folders: tuple[KeptFolder, ...]
    variables: dict[str, str]
    findings: tuple[Finding, ...]


def run_doctor(options: DoctorOptions) -> int:
    """Print what was seen; return the exit code: 1 if something would fail."""
    report = examined()
    if options.as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")
    else:
        _show(report, new_console())
    return FAILED if any(one.level == FAILS for one in report.findings) else 0


def examined() -> Report:
    """Look at everything; what raises an error becomes a finding."""
    broken = list[Finding]()

    def tolerated(what: str, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except PackageNotFoundError:
            sentence = NOT_INSTALLED
        except PolydraftError as error:
            sentence = str(error)
        except Exception as error:  # noqa: BLE001  whatever is broken here is what is to be told
            sentence = f"{what} cannot be told: {lowered(error)}"
        broken.append(Finding(FAILS, sentence))
        return otherwise

    packages = tolerated("What is installed", package_states, ())
    extras = tolerated("Which extras are installed", extra_states, ())
    machine = tolerated("What this machine has", _machine, None)
    used = () if machine is None else tolerated("What `polydraft generate` uses", lambda: _choices(machine), ())
    folders = tolerated("What is kept on disk", kept_folders, ())
    found = (
        *broken,
        *of_packages(packages, extras),
        *(() if machine is None else of_machine(machine)),
        *of_folders(folders),
        *of_variables(),
    )
    versions = {"polydraft": __version__, "python": platform.python_version(), "system": platform.platform()}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Report(versions, packages, extras, machine, used, folders, variables, found)


def _machine() -> "MachineFacts":
    from polydraft.cli.setup.machine_facts import machine_facts

    return machine_facts()


def _choices(machine: "MachineFacts") -> "tuple[MachineChoice, ...]":
    from polydraft.cli.setup.machine_facts import choices

    return choices(machine)


def _show(report: Report, console: Console) -> None:
    """Print a table for each part, and a line for each finding at the end."""
    values = named_values()
    for name, value in (report.versions | report.variables).items():
        values.add_row(name, value)
    console.print(values)
    packages = columns(("package", "installed", "needed"))
    for package in report.packages:
        packages.add_row(package.name, package.version or "not installed", package.wanted)
    extras = columns(("extra", "for", "state"))
    for extra in report.extras:
        extras.add_row(extra.name, extra.serves, extra.install or ("cannot be used" if extra.problem else "installed"))
    used = columns(("`generate` uses", "", "because"))
    for choice in report.generate:
        used.add_row(choice.what, choice.value, choice.why)
    folders = columns(("kept", "folder"), ("files", "MiB", "MiB free"))
    for one in report.folders:
        free = "" if one.free is None else f"{one.free >> 20:,}"
        folders.add_row(
            one.holds, Text(one.path or "nowhere", overflow="fold"), f"{one.files:,}", f"{one.size / 2**20:,.1f}", free
        )
    for table in (packages, extras, _machine_table(report.machine), used, folders):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    for finding in report.findings:
        style = "red" if finding.level == FAILS else "yellow"
        console.print(Text.assemble((finding.level, style), f"  {finding.sentence}"), soft_wrap=True)
    if not report.findings:
        console.print("Nothing was found that would fail or be slow.")


def _machine_table(facts: "MachineFacts | None") -> Table:
    table = named_values()
    if facts is not None:
        load = "" if facts.load is None else f", load {facts.load}"
        table.add_row("processor", f"{facts.processor}, {facts.cpus} CPUs to use{load}")
        table.add_row("memory", f"{facts.free / 2**30:,.1f} GiB free")
        table.add_row("GPUs", ", ".join(facts.gpus) or "none that torch sees")
    return table
