"""A client of a server under test: bounded answers, waits as they are told, one sentence for what is wrong."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from polydraft.conformance.http.engines import (
    Engine,
    SampledText,
    SampleRequest,
    chatting,
    engine_named,
    engine_of,
    read_texts,
)
from polydraft.errors import InvalidParameter, ServerError
from polydraft.extras import HTTP

if TYPE_CHECKING:
    import httpx

LARGEST = 64 << 20
"""Bytes of an answer."""
LONGEST_WAIT, MOST_WAITS = 60.0, 30
"""Seconds between two tries where a server says that it is busy, and how often it may."""
TIMEOUT, IDLE = 300.0, 2.0
"""Seconds for an answer, and those for which an idle connection is kept: servers close theirs after five or so."""
TOGETHER = 8
"""Requests in flight."""
SHOWN = 200
KEY = "POLYDRAFT_API_KEY"


class ServerClient:
    """A server, the model that is asked and the engine that it is.

    Args:
        url: where it listens, with or without `/v1`.
        model: the model's name; None for the only one that it lists.
        engine: its word; None to tell it from `/v1/models`.
        chat: whether prompts are sent as a user's message, of which the server makes them by its template.
        key: sent as a bearer token, and never shown.
        transport: of httpx, instead of the network.
        sleep: waits so many seconds; None to wait until the client is closed at most.

    Attributes:
        chats: whether prompts are sent in chats.
        lost: how many texts were asked for and never came.
        asked: how many were asked for.

    Raises:
        MissingExtra: httpx is not installed.
        InvalidParameter: no address, no such engine, or one whose chats cannot be tested.
        ServerError: there is no such server or model, or it wants a key.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        engine: str | None = None,
        *,
        chat: bool = False,
        key: str | None = None,
        transport: "httpx.BaseTransport | None" = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        HTTP.check()
        import httpx

        self.url, self.lost, self.asked, self.chats, self._closed = _checked(url), 0, 0, chat, Event()
        self._sleep = sleep or self._closed.wait
        headers = {"authorization": f"Bearer {key}"} if key else {}
        idle = httpx.Limits(keepalive_expiry=IDLE)
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT, transport=transport, trust_env=False, limits=idle)
        self._pool = ThreadPoolExecutor(TOGETHER)
        try:
            self.cards = self._cards()
            found = engine_of(self.cards) if engine is None else engine_named(engine)
            self.engine: Engine = chatting(found) if chat else found
            self.model = self._chosen(model)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Send no more, and close the connections once what is in flight has ended, without waiting for it."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        self._pool.shutdown(wait=True)
        self._client.close()  # before, it would miss a connection that a thread is just opening

    def _cards(self) -> list[Mapping[str, Any]]:
        found = self._asked("GET", "/v1/models")
        cards = found.get("data") if isinstance(found, Mapping) else None
        if not isinstance(cards, list) or not all(isinstance(one, Mapping) for one in cards):
            raise ServerError(
                f"{self.url}/v1/models has no list of models: give the address of an OpenAI-compatible server."
            )
        return cards

    def _chosen(self, wanted: str | None) -> str:
        names = [str(one.get("id")) for one in self.cards]
        if wanted is None and len(names) != 1:
            said = f"{self.url} has {len(names)} models"
            raise InvalidParameter(f"{said}: name one by --model{_listed(names)}.")
        if wanted is not None and names and wanted not in names and f"{wanted}:latest" not in names:
            raise ServerError(f"{self.url} has no model {wanted!r}{_listed(names)}.")
        return wanted or names[0]

    def check_same_models(self) -> None:
        """Check that the server still has the models that it had.

        Raises:
            ServerError: it has others.
        """
        before, after = ([(one.get("id"), one.get("root")) for one in cards] for cards in (self.cards, self._cards()))
        if before != after:
            raise ServerError(f"{self.url} changed its models while it was tested: test it again.")

    def texts(self, requests: Iterator[SampleRequest]) -> Iterator[list[SampledText] | None]:
        """Yield the texts of requests in the order of the requests, whatever order they come in; None for lost ones.

        Raises:
            ServerError: it refuses a request, or answers what cannot be read.
        """
        waiting = deque[tuple[SampleRequest, Future[Any]]]()
        for one in requests:
            waiting.append((one, self._pool.submit(self._asked, "POST", self.engine.path, self.engine.fields(one))))
            if len(waiting) >= 2 * TOGETHER:
                yield self._read(*waiting.popleft())
        while waiting:
            yield self._read(*waiting.popleft())

    def _read(self, asked: SampleRequest, coming: "Future[Any]") -> list[SampledText] | None:
        self.asked += asked.count
        answer = coming.result()
        if answer is None:
            self.lost += asked.count
            return None
        return read_texts(self.engine, answer, asked.count, self.url)

    def _asked(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> Any:
        """Return what an address answers; None if it does not answer in time, or breaks off, twice.

        A server closes connections that were idle, also just when the next request is sent on one: that is asked again.
        """
        import httpx

        late, status, broken = 0, 0, (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
        for _ in range(MOST_WAITS):
            if self._closed.is_set():
                return None  # nobody waits for it
            try:
                status, headers, body = self._sent(method, path, fields)
            except (httpx.TimeoutException, *broken) as error:
                late += 1
                if late > 1 and method == "POST":
                    return None
                if late > 1:
                    said = "breaks off" if isinstance(error, broken) else f"does not answer in {TIMEOUT:g} seconds"
                    raise ServerError(f"{self.url} {said}.") from error
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ServerError(
                    f"There is no server at {self.url} ({str(error)[:SHOWN] or type(error).__name__})."
                ) from error
            if status not in (429, 503):
                return self._value(path, status, headers, body)
            self._sleep(_wait(headers.get("retry-after")))
        raise ServerError(f"{self.url} was busy {MOST_WAITS} times in a row (status {status}): try again later.")

    def _sent(self, method: str, path: str, fields: Mapping[str, Any] | None) -> tuple[int, Mapping[str, str], bytes]:
        with self._client.stream(method, self.url + path, json=fields) as answer:
            body = b""
            for part in answer.iter_bytes():
                body += part
                if len(body) > LARGEST:
                    raise ServerError(f"{self.url}{path} answers more than {LARGEST >> 20} MiB.")
            return answer.status_code, answer.headers, body

    def _value(self, path: str, status: int, headers: Mapping[str, str], body: bytes) -> Any:
        place = f"{self.url}{path}"
        if status in (401, 403):
            raise ServerError(f"{place} wants a key (status {status}): set {KEY}.")
        html = "html" in headers.get("content-type", "") or body.lstrip()[:1] == b"<"
        try:
            value = None if html else json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if status != 200:
            reason = _reason(value) or ("a web page" if html else "no reason")
            raise ServerError(f"{place} answers with status {status}: {reason}.")
        if not isinstance(value, dict | list):
            raise ServerError(
                f"{place} answers {'a web page' if html else 'no JSON'}: "
                "give the address of an OpenAI-compatible server."
            )
        return value


def _checked(url: str) -> str:
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidParameter(f"--url must be like http://localhost:8000, but is {url!r}.")
    if parts.username or parts.password:
        raise InvalidParameter(f"--url must not hold a key, which would be shown: set {KEY}.")
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def _listed(names: Sequence[str]) -> str:
    return f"; it has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else ""


def _wait(told: str | None) -> float:
    try:
        seconds = float(told or 1)
    except ValueError:
        seconds = 1.0
    return min(max(seconds, 0.05), LONGEST_WAIT) if seconds == seconds else 1.0


def _reason(value: Any) -> str:
    """Return what an error says, in OpenAI's shape or in others."""
    error = value.get("error", value.get("detail", value.get("message"))) if isinstance(value, Mapping) else None
    if isinstance(error, Mapping):
        error = error.get("message")
    return " ".join(str(error).split())[:SHOWN].rstrip(".") if error else ""
