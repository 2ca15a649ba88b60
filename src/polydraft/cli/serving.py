"""`polydraft serve`: the port, the model, and the server until it is told to stop."""

import asyncio
import ipaddress
import signal
import socket
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

from polydraft.cli.printing import say_on_one_line
from polydraft.cluster import joined, named_cluster
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.extras import SERVE
from polydraft.options.commands.serve_options import Settings

LOCAL = "localhost"
RAY_SIGNALS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM))
GLANCE = 0.1
"""Seconds between two looks for a signal."""
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
    if settings.ray:
        return _run_on_ray(settings)
    if settings.parallel is not None:
        _follow_if_other_rank(settings)
    import uvicorn

    from polydraft.server import build_app
    from polydraft.server.front.logs import log, write_logs

    host = settings.host
    listening = bound(host, settings.port)
    alone = _is_of_this_machine(listening)
    settings = _guarded(settings, alone=alone)
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
        _say_begun(settings, number, alone=alone)
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
                _say_ready(settings, number)
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


def _is_of_this_machine(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def _guarded(settings: Settings, *, alone: bool) -> Settings:
    """Return settings by which no other name than this machine's is answered to, where only it can call."""
    return replace(settings, hosts=settings.hosts or (LOCAL,)) if alone and not settings.keys else settings


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say_begun(settings: Settings, port: int, *, alone: bool) -> None:
    if not alone and not settings.keys:
        place = f"{_shown(settings.host)}:{port}"
        say_on_one_line(f"No key is needed, so whoever reaches {place} may use the model: set --api-key.")
    say_on_one_line("Loading the model ...")


def _say_ready(settings: Settings, port: int) -> None:
    place = f"http://{_shown(settings.host)}:{port}"
    say_on_one_line(f"{settings.name} is served at {place} with the page at /; Ctrl-C stops it.")


def _run_on_ray(settings: Settings) -> int:
    """Serve from a Ray cluster until SIGTERM or Ctrl-C; SIGUSR1 lets the copies of the model be started anew.

    Raises:
        ClusterError: there is no cluster, or it cannot serve the model.
        InvalidParameter: nobody can listen there.
        MissingExtra: Ray is not installed.
    """
    port, alone = _place_on_head(settings)
    settings = _guarded(replace(settings, port=port), alone=alone)
    with joined(settings.address) as ray:
        from polydraft.server.ray.deploying import RayServer

        server, told = RayServer(ray, settings), list[int]()
        server.check()
        _say_begun(settings, port, alone=alone)
        try:
            server.start()
            for number in RAY_SIGNALS:
                signal.signal(number, lambda number, _: told.append(number))
            _say_ready(settings, port)
            _obey(server, told)
        finally:
            server.stop()
    return 0


def _place_on_head(settings: Settings) -> tuple[int, bool]:
    """Return at which port the cluster's head is to listen, and whether only that machine can call there.

    Raises:
        InvalidParameter: nobody can listen there, which can be seen where the head is this machine.
    """
    if named_cluster(settings.address) is None:
        with bound(settings.host, settings.port) as listening:
            return listening.getsockname()[1], _is_of_this_machine(listening)
    if not settings.port:
        raise InvalidParameter("--port 0 takes a free port of this machine: name one of the cluster's head.")
    try:
        return settings.port, ipaddress.ip_address(settings.host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return settings.port, settings.host.lower() == LOCAL


def _obey(server: Any, told: list[int]) -> None:
    """Do what signals say until one of them says stop; one that comes while it stops ends the process at once."""
    while True:
        while not told:
            time.sleep(GLANCE)
        if told.pop(0) in (signal.SIGINT, signal.SIGTERM):
            break
        try:
            server.restart()
        except PolydraftError as error:  # those that are there are better than nothing
            say_on_one_line(f"Not all copies of the model were started anew: {error}")
        else:
            say_on_one_line("All copies of the model were started anew.")
    say_on_one_line("Stopping after what runs; Ctrl-C again stops at once.")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_at_once)


def _leave_at_once(*_: Any) -> None:
    raise KeyboardInterrupt


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
