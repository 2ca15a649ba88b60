"""The command line: one command is one public function, imported when it is called."""

from polydraft.cli.commands import main

__all__ = ["main"]
