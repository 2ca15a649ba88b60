"""Options of the commands about this machine: `polydraft doctor` and `polydraft completion`."""

from dataclasses import dataclass

from polydraft.options.commands.option_groups import JSON
from polydraft.options.option import Option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """One call of `polydraft doctor`."""

    as_json: bool = JSON.but(panel=None).usually(False)


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """One call of `polydraft completion`."""

    shell: str = Option(
        "bash, zsh, fish or powershell.", argument=True, metavar="SHELL", words=("bash", "zsh", "fish", "powershell")
    ).needed()
