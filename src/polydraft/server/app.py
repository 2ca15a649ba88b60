"""The application as a value: everything a server answers, to be run by any ASGI server."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from polydraft.options.commands.serve_options import Settings
from polydraft.server.front.bodies import BodyRoute
from polydraft.server.front.desk import Desk
from polydraft.server.front.door import ID, RequestGate
from polydraft.server.front.logs import log, traced
from polydraft.server.front.metrics import Metrics
from polydraft.server.page_routes import add_page
from polydraft.server.routes import add_routes
from polydraft.server.wire.error_answers import Refused, of_fields, ours
from polydraft.server.wire.openapi import described

PAGE = Path(__file__).parent / "page"


def build_app(settings: Settings, *, waits: bool = True) -> FastAPI:
    """Return the application; its worker starts with it, unless `app.state.desk.launch()` was called before.

    Args:
        settings: what the operator decides.
        waits: whether it begins to answer when the model is loaded. Otherwise it begins at once, and refuses what needs
            the model (503) until then; `app.state.desk.wait()` raises why it cannot be loaded.
    """
    metrics = Metrics(settings.name, vllm=settings.vllm_metrics)
    desk = Desk(settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await desk.open(waits=waits)
        try:
            yield
        finally:
            await desk.close()

    app = FastAPI(title="polydraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.desk, app.state.settings, app.state.begun = desk, settings, int(time.time())
    app.router.route_class = BodyRoute
    add_routes(app)
    add_page(app, PAGE)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _wrong_fields)
    app.add_exception_handler(HTTPException, _plain_error)
    app.add_exception_handler(Exception, _ours)
    app.add_middleware(RequestGate, desk=desk)
    if settings.origins:  # outside of the door: browsers ask without a key whether they may send one
        exposed = ["x-request-id", "retry-after"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    usual = app.openapi
    app.openapi = lambda: described(usual(), desk.told.get("vocab_size"))  # pyright: ignore[reportAttributeAccessIssue]
    return app


def _answered(request: Request, error: Refused) -> Response:
    request.app.state.desk.metrics.add_by("request_refused", error.status)
    return JSONResponse(error.body(), error.status, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _answered(request, error)


async def _wrong_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answered(request, of_fields(error.errors(), request.scope["route"].endpoint.__annotations__.get("body")))


async def _plain_error(request: Request, error: Exception) -> Response:
    """Say in our shape what the framework says: that there is no such page, or no such method of one."""
    assert isinstance(error, HTTPException)
    sentences = {404: "There is nothing at this address.", 405: "This address is not for this method."}
    said = sentences.get(error.status_code, "The body cannot be read as JSON.")
    answer = JSONResponse(Refused(error.status_code, said).body(), error.status_code, error.headers)
    request.app.state.desk.metrics.add_by("request_refused", error.status_code)
    return answer


async def _ours(request: Request, error: Exception) -> Response:
    name = str(request.scope.get("state", {}).get("request_id", ""))
    log("request failed", level=logging.ERROR, id=name, error=traced(error))
    answer = _answered(request, ours(name))
    answer.headers[ID] = name
    return answer
