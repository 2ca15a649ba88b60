"""An OpenAI-compatible server for any target with any drafter: `build_app` returns it as a value.

It needs the packages of the extra `serve`.
"""

from polydraft.options.commands.serve_options import Settings
from polydraft.server.app import build_app

__all__ = ["Settings", "build_app"]
