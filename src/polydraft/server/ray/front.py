"""The front in a Ray cluster: the same application as elsewhere, whose workers are copies of the model on its nodes."""

import asyncio
from typing import Any

from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.app import build_app
from polydraft.server.front.logs import log, write_logs
from polydraft.server.ray.replica_worker import ReplicaPool

MODELS, MODEL, FRONT = "polydraft-models", "ModelReplica", "polydraft"
"""The application of the copies and their deployment, and the application of the front."""


class RayFront:
    """What Ray Serve makes of the front: it is the ingress, and sees all requests and all metrics.

    Args:
        settings: the server's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, which Ray asks for on the node where the front lies."""
        from ray import serve  # pyright: ignore[reportMissingImports]

        write_logs()
        pool = ReplicaPool(serve.get_deployment_handle(MODEL, app_name=MODELS))
        self._app = build_app(self._settings, waits=False, hire=pool.hire)
        return self._app

    async def loaded(self) -> str:
        """Wait until the least number of copies have loaded the model; return why one cannot, if one cannot."""
        try:
            await asyncio.to_thread(self._app.state.desk.wait)
        except PolydraftError as error:
            return str(error)
        log(
            "serving", model=self._settings.name, batch_size=self._settings.batch_size, replicas=self._settings.replicas
        )
        return ""

    async def drain(self) -> None:
        """Refuse what comes, and wait until what is there has ended, or its time is over."""
        await self._app.state.desk.drain()
