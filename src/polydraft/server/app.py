"""The application as a value: what is answered at which address, to be run by any ASGI server."""

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from polydraft import __version__
from polydraft.options.commands.serve_options import Settings
from polydraft.server.front.answering import answer, attended
from polydraft.server.front.desk import Desk
from polydraft.server.front.door import ID, RequestGate
from polydraft.server.front.logs import log
from polydraft.server.front.metrics import Metrics
from polydraft.server.page_routes import add_page, page_options
from polydraft.server.wire.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)
from polydraft.server.wire.answers import AnswerShape
from polydraft.server.wire.bodies import BodyRoute
from polydraft.server.wire.error_answers import Refused, of_fields, ours
from polydraft.server.wire.openapi import ASKED, ERRORS, answers, described
from polydraft.server.wire.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from polydraft.server.worker import Ask, Hire, traced


def build_app(settings: Settings, *, waits: bool = True, hire: Hire | None = None) -> FastAPI:
    """Return the application; its worker starts with it, unless `app.state.desk.launch()` was called before.

    Args:
        settings: what the operator decides.
        waits: whether it begins to answer when the model is loaded. Otherwise it begins at once, and refuses what needs
            the model (503) until then; `app.state.desk.wait()` raises why it cannot be loaded.
        hire: makes its workers, where these are neither processes nor threads of this machine.
    """
    metrics = Metrics(settings.name, vllm=settings.vllm_metrics, learns=settings.learn is not None)
    desk = Desk(settings, metrics, hire)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await desk.open(waits=waits)
        try:
            yield
        finally:
            await desk.close()

    app = FastAPI(title="polydraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.desk, app.state.settings, app.state.begun, app.state.count = desk, settings, int(time.time()), 0
    app.router.route_class = BodyRoute
    for add in (_add_texts, _add_tokens, _add_models, _add_state):
        add(app)
    add_page(app)
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


def _answered(request: Request, error: Refused, headers: Mapping[str, str] | None = None) -> Response:
    request.app.state.desk.metrics.add_by("request_refused", error.status)
    return JSONResponse(error.body(), error.status, error.headers | dict(headers or {}))


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
    return _answered(request, Refused(error.status_code, said), error.headers)


async def _ours(request: Request, error: Exception) -> Response:
    name = str(request.scope.get("state", {}).get("request_id", ""))
    log("request failed", level=logging.ERROR, id=name, error=traced(error))
    return _answered(request, ours(name), {ID: name})


def _taken(request: Request, kind: str, model: str | None) -> tuple[Desk, str]:
    """Return the desk that a request goes to, and its answer's id, which has a number of ours behind the client's."""
    state = request.app.state
    _check_model(request, model)
    state.count += 1
    return state.desk, f"{kind}-{request.scope['state']['request_id']}-{state.count}"


def _check_model(request: Request, name: str | None) -> None:
    own = request.app.state.settings.name
    if name not in (None, own):
        raise Refused(404, f"model must be {own}; this server has no other one.", "model", "model_not_found")


def _add_texts(app: FastAPI) -> None:
    model = app.state.settings.name

    @app.post("/v1/completions", responses=answers(Completion, CompletionChunk))
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts."""
        desk, name = _taken(request, "cmpl", body.model)
        shape = AnswerShape(
            name, model, chat=False, logprobs=body.logprobs is not None, token_ids=body.return_token_ids
        )
        return await answer(desk, request, _asked(request, body, name), body, shape)

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        desk, name = _taken(request, "chatcmpl", body.model)
        shape = AnswerShape(name, model, chat=True, logprobs=body.logprobs, token_ids=body.return_token_ids)
        return await answer(desk, request, _asked(request, body, name), body, shape)


def _asked(request: Request, body: CompletionBody | ChatBody, name: str) -> Ask:
    """Return what the worker is asked; of a key whose texts are not learnt from, as if the request had said so."""
    ask = body.as_ask(name)
    return ask if request.scope["state"]["learns"] else replace(ask, learn=False)


async def _spelt(request: Request, kind: str, body: TokenizeBody | DetokenizeBody) -> Mapping[str, Any]:
    desk, name = _taken(request, kind, body.model)
    ticket, event = await attended(desk, request, body.as_spell(name))
    desk.leave(ticket)
    return event.said


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", responses=answers(Tokenized))
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        """Return the tokens of a text or conversation."""
        said = await _spelt(request, "tok", body)
        told: Tokenized = {
            "count": len(said["tokens"]),
            "max_model_len": said["length"],
            "tokens": said["tokens"],
            "token_strs": said["texts"],
        }
        return JSONResponse(told)

    @app.post("/detokenize", responses=answers(Detokenized))
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        """Return the text of tokens."""
        said = await _spelt(request, "detok", body)
        told: Detokenized = {"prompt": said["text"]}
        return JSONResponse(told)


def _add_models(app: FastAPI) -> None:
    def card() -> ModelCard:
        told, settings = app.state.desk.told, app.state.settings
        return {
            "id": settings.name,
            "object": "model",
            "created": app.state.begun,
            "owned_by": "polydraft",
            "root": settings.name,
            "max_model_len": told.get("context"),
            "verifier": told.get("verifier"),
            "lossless": told.get("lossless"),
            "tuned_from": told.get("tuned_from"),
        }

    @app.get("/v1/models", responses={200: {"model": ModelList}, **ASKED})
    async def models() -> Response:
        """List the model."""
        told: ModelList = {"object": "list", "data": [card()]}
        return JSONResponse(told)

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **ASKED, 404: ERRORS[404]})
    async def model(request: Request, name: str) -> Response:
        """Tell about the model."""
        _check_model(request, name)
        return JSONResponse(card())


def _add_state(app: FastAPI) -> None:
    desk: Desk = app.state.desk

    @app.get("/health", responses={200: {"model": Health}, **ASKED})
    async def health() -> Response:
        """Tell whether requests are taken."""
        desk.check_open()
        told: Health = {"status": "ok"}
        return JSONResponse(told)

    @app.get("/metrics", response_class=PlainTextResponse, responses=ASKED)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(desk.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses={200: {"model": Version}, **ASKED})
    async def version() -> Response:
        """Return the version."""
        told: Version = {"version": __version__}
        return JSONResponse(told)

    @app.get("/polydraft/options", responses={200: {"model": dict[str, Any]}, **ASKED})
    async def options() -> Response:
        """Return what the page can choose from."""
        return JSONResponse(page_options(app.state.settings, desk.told))
