"""The page and its files, with headers by which a browser loads nothing from elsewhere."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

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


def add_page(app: FastAPI, folder: Path) -> None:
    """Serve the page of a folder at `/`, and its files under `/page/`; nothing if there is none."""
    if not (folder / "index.html").is_file():
        return

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page."""
        return FileResponse(folder / "index.html", headers=HEADERS)

    app.mount("/page", _Files(directory=folder), name="page")
