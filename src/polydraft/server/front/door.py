"""The door: what is asked of every request before anybody reads it, in plain ASGI."""

import asyncio
import hmac
import ipaddress
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.server.front.desk import Desk
from polydraft.server.front.logs import log, request_id
from polydraft.server.wire.bodies import READ, read_body
from polydraft.server.wire.error_answers import Refused, readable, told

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""The beginnings of paths that need a key, where there are keys."""
OF_THE_MODEL = (*GUARDED, "/polydraft/")
"""The beginnings of paths at which nothing can be said before the model is loaded."""
BODY_SECONDS = 30.0
"""A body must have come within so many seconds."""
ID = "x-request-id"


class RequestGate:
    """Give every request an id, read its body up to a limit, look at its key, and write a line about it.

    HEAD is GET whose body is left out. While the model is loaded for the first time, what needs it is refused.
    """

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self.app, self.desk = app, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, begun, status = Headers(scope=scope), time.perf_counter(), [0]
        name = request_id(headers.get(ID))
        scope.setdefault("state", {})["request_id"] = name

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID.encode(), name.encode())]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check_host(headers)
            scope["state"]["learns"] = self._check_key(_route(scope), headers)
            if not self.desk.told and _route(scope).startswith(OF_THE_MODEL):
                self.desk.check_open()
            body = await self._body(scope, receive, headers) if scope["method"] in ("POST", "PUT", "PATCH") else None
            if body:
                scope[READ] = await read_body(body, self.desk.told.get("context"))
            inside = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(inside, receive if body is None else _again(body, receive), sending)
        except Refused as error:
            self.desk.metrics.add_by("request_refused", error.status)
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, sending)
        except Exception:
            status[0] = status[0] or 500  # it is answered further out
            raise
        finally:
            self._logged(scope, name, status[0], time.perf_counter() - begun)

    def _check_host(self, headers: Headers) -> None:
        allowed, called = self.desk.settings.hosts, headers.get("host", "").lower()
        name = called.rpartition(":")[0] if called.rpartition(":")[2].isdigit() and "]" != called[-1:] else called
        if allowed and name not in ("localhost", *map(str.lower, allowed)) and not is_address(name.strip("[]")):
            raise Refused(400, "This server is not called by this name; its operator can allow it.", None, "wrong_host")

    def _check_key(self, path: str, headers: Headers) -> bool:
        """Check the key; all keys are looked at, in a time that does not depend on what was sent.

        Returns:
            whether the key's texts may be learnt from.
        """
        keys, others = self.desk.settings.keys, self.desk.settings.unlearnt_keys
        if not keys or not path.startswith(GUARDED):
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "replace") if kind.lower() == "bearer" else b""
        if not any([hmac.compare_digest(given, one.encode()) for one in keys]):
            raise Refused(401, "Send a valid API key, as Authorization: Bearer KEY.", None, "invalid_api_key")
        return not any([hmac.compare_digest(given, one.encode()) for one in others])

    async def _body(self, scope: Scope, receive: Receive, headers: Headers) -> bytes:
        """Read the body, unless it is encoded, is too long, or takes too long."""
        encoding = ", ".join(headers.getlist("content-encoding")).strip()
        if encoding.lower() not in ("", "identity"):
            said = f"The Content-Encoding {readable(told(encoding))} is not supported; send the body as it is."
            raise Refused(415, said, None, "unsupported_encoding")
        most, said = self.desk.settings.max_body, headers.get("content-length", "")
        if said.isdigit() and int(said[:20]) > most:
            raise _too_long(most)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in Request(scope, receive).stream():
                    body += part
                    if len(body) > most:
                        raise _too_long(most)
                return bytes(body)
        except ClientDisconnect:
            raise Refused(400, "The client went away before its body had come.") from None
        except TimeoutError:
            raise Refused(408, f"The body did not come within {BODY_SECONDS:.0f} seconds.") from None

    def _logged(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        if _route(scope) in ("/health", "/metrics") and (status == 200 or not self.desk.told):
            return  # whoever asks again and again whether the model is there
        head = {"id": name, "method": scope["method"], "path": scope["path"][:200], "status": status or 499}
        log("request", **head, seconds=round(seconds, 4), **scope["state"].get("told", {}))


def is_address(name: str) -> bool:
    """Tell whether a name is an address in numbers, which nobody can make mean another machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _route(scope: Scope) -> str:
    """Return the path by which a request finds its route: what comes behind the place where the app is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _too_long(most: int) -> Refused:
    return Refused(413, f"The body is longer than the {most} bytes that this server takes.", None, "body_too_long")


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what hands a body out that was read, and then what comes behind it."""
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving
