"""`polydraft completion`: the script by which a shell completes commands, options and words."""

import sys

from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

from polydraft.options.commands.setup_options import CompletionOptions


def run_completion(options: CompletionOptions) -> None:
    """Print the script; the shell then asks the command itself at every TAB, by an environment variable."""
    script = get_completion_script(prog_name="polydraft", complete_var="_POLYDRAFT_COMPLETE", shell=options.shell)
    sys.stdout.write(f"{script}\n")
