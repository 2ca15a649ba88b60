"""`polydraft serve`: the port, the model, and the server until it is told to stop."""

import asyncio
import ipaddress
import signal
import socket
import threading
from dataclasses import replace
from types import FrameType
from typing import Any

from polydraft.cli.printing import say_on_one_line
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.extras import SERVE
from polydraft.options.commands.serve_options import Settings

LOCAL = "localhost"
PATIENCE = 2
"""Connections that are still open when all requests have ended have so many seconds."""


def run_serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code. SIGUSR1 lets the workers be started anew.

    At an address of this machine alone and without keys only this machine's names are answered to, unless others are
    allowed: else any page that a browser on it shows could call, by a name that it makes mean this machine.

    Raises:
        InvalidParameter: nobody can listen there.
        MissingExtra: a package of the extra cannot be used.
        PolydraftError: the model cannot be served.
    """
    SERVE.check()
    if settings.parallel is not None:
        _follow_if_other_rank(settings)
    import uvicorn

    from polydraft.server import build_app
    from polydraft.server.front.logs import log, write_logs

    host = settings.host
    listening = bound(host, settings.port)
    alone = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
    if alone and not settings.keys:
        settings = replace(settings, hosts=settings.hosts or (LOCAL,))
    try:
        write_logs()
        app = build_app(settings, waits=False)
        desk = app.state.desk
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=PATIENCE,
            limit_concurrency=settings.max_connections + 1,  # where it is reached, the connection itself is counted
        )
        number = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        if not alone and not settings.keys:
            say_on_one_line(f"No key is needed, so whoever reaches {shown}:{number} may use the model: set --api-key.")
        say_on_one_line("Loading the model ...")
        server = _serving(uvicorn, config, desk)

        failures: list[PolydraftError] = []

        def announce() -> None:
            """Say when the model is loaded; end the server if it cannot be."""
            try:
                desk.wait()
            except PolydraftError as error:
                failures.append(error)
                server.should_exit = True
                return
            if desk.ready and not desk.stopping:
                say_on_one_line(
                    f"{settings.name} is served at http://{shown}:{number} with the page at /; Ctrl-C stops it."
                )
                told = {"batch_size": settings.batch_size, "workers": desk.pids}
                log("serving", model=settings.name, host=host, port=number, **told)

        threading.Thread(target=announce, daemon=True).start()
        try:
            server.run(sockets=[listening])
        finally:
            asyncio.run(desk.close())
    finally:
        listening.close()
    if failures:
        raise failures[0]
    if not desk.told:
        desk.wait(0.0)
    return 0


def _follow_if_other_rank(settings: Settings) -> None:
    """Load a part and leave when rank 0 has ended, where torchrun has started this process for another rank."""
    from polydraft.models import is_other_rank
    from polydraft.server.worker.served import load_served

    if is_other_rank(settings.parallel):
        load_served(settings)


def _serving(uvicorn: Any, config: Any, desk: Any) -> Any:
    """Return a server that lets running requests end when it is told to stop; told again, it stops at once."""

    class Server(uvicorn.Server):
        draining: Any = None
        replacing: Any = None

        async def startup(self, sockets: Any = None) -> None:
            """Begin; from then on a signal lets workers be replaced, where there is such a signal."""
            await super().startup(sockets)
            if "SIGUSR1" in signal.Signals.__members__ and threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._replace)

        def _replace(self) -> None:
            if desk.told and not desk.stopping:
                self.replacing = asyncio.ensure_future(desk.replace_workers())

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Take note of a signal; while the model is loaded nothing has begun, and it ends the process."""
            if not desk.told:
                super().handle_exit(sig, frame)
                return
            if self.draining is not None or not self.started:
                self.should_exit = self.force_exit = True
                return
            self.draining = "soon"
            say_on_one_line("Stopping after what runs; Ctrl-C again stops at once.")
            asyncio.get_running_loop().call_soon_threadsafe(self._drain)

        def _drain(self) -> None:
            self.draining = asyncio.ensure_future(desk.drain())
            self.draining.add_done_callback(lambda _: setattr(self, "should_exit", True))

    return Server(config)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        InvalidParameter: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidParameter(f"Nobody can listen at {host}:{port}: {reason}; choose another --port.") from error
    return found
