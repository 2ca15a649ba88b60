"""The page: its files, which load nothing from elsewhere, and the words that it can choose from."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import polydraft.catalogue as catalogue
import polydraft.catalogue.tables as tables
from polydraft import __version__
from polydraft.options.commands.serve_options import Settings

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve the page at `/`, and its files under `/page/`."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page."""
        return FileResponse(PAGE / "index.html", headers=HEADERS)

    app.mount("/page", _Files(directory=PAGE), name="page")


def page_options(settings: Settings, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model, the words of drafters, verifiers and trees with their meanings, and what holds by default.

    Args:
        settings: the server's.
        told: what the worker says of its model.
    """
    words = [word for word in told.get("drafters", ()) if word != "none"]
    rules = catalogue.rule_words(lossless=True)
    return {
        "models": [settings.name],
        "target": settings.name,
        "drafters": [{"word": word, "meaning": _meaning(_drafter(word))} for word in words],
        "verifiers": [{"word": word, "meaning": _meaning(catalogue.rule_line(word).make)} for word in rules],
        "trees": [example for line in tables.POLICIES for example in line.examples[:1]],
        "chat": bool(told.get("chat")),
        "learns": settings.learn is not None,
        "context": told.get("context"),
        "defaults": {
            "drafter": settings.drafter_word,  # None: by model and temperature
            "verifier": settings.verifier,
            "lossless": told.get("lossless"),
            "tree": settings.tree,
            "temperature": 0.7,  # what the page begins with; a request that says nothing has 1
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 256,
        },
        "version": __version__,
    }


def _drafter(word: str) -> Any:
    line = catalogue.drafter_line(word)
    is_public = line.kind is not None and not line.kind.__name__.startswith("_")
    return line.kind if is_public and not line.wraps else line.make


def _meaning(made: Any) -> str:
    """Return the first sentence of what something says of itself, as a description."""
    said = " ".join((made.__doc__ or "").strip().split("\n\n")[0].split())
    first = re.split(r"(?<!\.)\. ", said)[0]  # the dots of `x_1 ... x_n` end no sentence
    first = first.removesuffix(".").removeprefix("Return ")
    return first[:1].upper() + first[1:]
