"""What is answered at which address."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from polydraft import __version__
from polydraft.server.front.answering import answer, attended
from polydraft.server.front.desk import Desk
from polydraft.server.options import page_options
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
from polydraft.server.wire.error_answers import Refused
from polydraft.server.wire.openapi import ASKED, ERRORS, answers
from polydraft.server.wire.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody


def add_routes(app: FastAPI) -> None:
    """Add everything but the page to an app."""
    _add_texts(app)
    _add_tokens(app)
    _add_models(app)
    _add_state(app)


def _desk(request: Request) -> Desk:
    return request.app.state.desk


def _id(request: Request, kind: str) -> str:
    """Return an answer's id: two requests may bear one id of their client's, so it has a number of ours behind it."""
    state = request.app.state
    state.count = getattr(state, "count", 0) + 1
    return f"{kind}-{request.scope['state']['request_id']}-{state.count}"


def _check_model(request: Request, name: str | None) -> None:
    own = request.app.state.settings.name
    if name not in (None, own):
        raise Refused(404, f"model must be {own}; this server has no other one.", "model", "model_not_found")


def _add_texts(app: FastAPI) -> None:
    @app.post("/v1/completions", responses=answers(Completion, CompletionChunk))
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts."""
        _check_model(request, body.model)
        name = _id(request, "cmpl")
        shape = AnswerShape(name, request.app.state.settings.name, False, body.logprobs is not None)
        return await answer(_desk(request), request, body.as_ask(name), body, shape)

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        _check_model(request, body.model)
        name = _id(request, "chatcmpl")
        shape = AnswerShape(name, request.app.state.settings.name, True, body.logprobs)
        return await answer(_desk(request), request, body.as_ask(name), body, shape)


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", responses=answers(Tokenized))
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        """Return the tokens of a text or conversation."""
        _check_model(request, body.model)
        desk = _desk(request)
        ticket, event = await attended(desk, request, body.as_spell(_id(request, "tok")))
        desk.leave(ticket)
        told: Tokenized = {
            "count": len(event.said["tokens"]),
            "max_model_len": event.said["length"],
            "tokens": event.said["tokens"],
            "token_strs": event.said["texts"],
        }
        return JSONResponse(told)

    @app.post("/detokenize", responses=answers(Detokenized))
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        """Return the text of tokens."""
        _check_model(request, body.model)
        desk = _desk(request)
        ticket, event = await attended(desk, request, body.as_spell(_id(request, "detok")))
        desk.leave(ticket)
        told: Detokenized = {"prompt": event.said["text"]}
        return JSONResponse(told)


def _add_models(app: FastAPI) -> None:
    def card() -> ModelCard:
        desk, settings = app.state.desk, app.state.settings
        return {
            "id": settings.name,
            "object": "model",
            "created": app.state.begun,
            "owned_by": "polydraft",
            "root": settings.name,
            "max_model_len": desk.told.get("context"),
            "verifier": desk.told.get("verifier"),
            "lossless": desk.told.get("lossless"),
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
