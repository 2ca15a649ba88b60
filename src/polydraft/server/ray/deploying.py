"""Server and models put into a Ray cluster, started anew copy by copy, and taken out of it again."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from polydraft.cluster import at_its_place, check_nodes, first_sentence, gpus_of_copy, part_of_ray
from polydraft.errors import ClusterError, InvalidParameter
from polydraft.options.commands.serve_options import Settings
from polydraft.server.ray.front import FRONT, MODEL, MODELS, RayFront
from polydraft.server.ray.replica import ModelReplica
from polydraft.server.ray.replica_router import PlacingRouter

ON_HEAD = {"node:__internal_head__": 0.001}
"""What Ray gives to the head of a cluster alone: the front lies there, since without the head nothing can be asked."""
UPSCALE, DOWNSCALE = 10.0, 300.0
"""Seconds for which there must be too many texts, or too few, before a copy comes or goes."""
CHECKS = 5.0
"""Seconds between two looks at a copy; the third in a row that finds it dead or hung ends it."""
TRIES = 3
"""How often Ray tries to start a copy that ends in an error, which is not one that cannot load its model."""
AT_ONCE = 100
"""Per cent of the copies that are started anew before the old ones end, where the cluster has room for them."""


class RayServer:
    """A server in a cluster that this process has joined.

    Args:
        ray: the package.
        settings: the server's.
    """

    def __init__(self, ray: Any, settings: Settings) -> None:
        self._ray, self._serve = ray, part_of_ray("serve")
        names = ("target", "draft", "drafter")
        placed: dict[str, Any] = {name: at_its_place(getattr(settings, name)) for name in names}
        self.settings = replace(settings, **placed, model_name=settings.name)
        self._front: Any = None
        self.cpus = float(settings.threads or 1)
        self.gpus = gpus_of_copy(ray, settings.device)

    def check(self) -> None:
        """Check that the nodes can do the work.

        Raises:
            ClusterError: one cannot, or something else is served there.
        """
        told = self.settings
        word, _, folder = (told.drafter or "").partition(":")
        store = folder if word == "suffix" and folder else None
        files = [told.target, told.draft, None if store else folder]
        check_nodes(self._ray, cpus=self.cpus, gpus=self.gpus, models=files, store=store)
        if self._serve.status().proxies:
            raise ClusterError(
                "Ray Serve runs in this cluster already, at an address of its own: end it (`serve shutdown`), or use "
                "another cluster."
            )

    def start(self) -> None:
        """Start copies and front, and wait until there are as many copies as there are at least.

        Raises:
            ClusterError: Ray cannot start them, or one cannot load the model.
        """
        told = self.settings
        with _as_sentences():
            self._serve.start(
                proxy_location="HeadOnly",
                http_options={"host": told.host, "port": told.port},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
        front = self._serve.deployment(
            ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
            max_ongoing_requests=told.max_connections,
            max_queued_requests=told.max_connections,
            graceful_shutdown_timeout_s=told.grace,
        )(self._serve.ingress()(RayFront))
        with _as_sentences():
            self._run(self._models(surge=0), MODELS, None)
            self._front = self._run(front.bind(told), FRONT, "/")
            why = self._front.loaded.remote().result()
        if why:
            raise ClusterError(why)

    def restart(self) -> None:
        """Start all copies anew, some at a time, of which each ends what it has begun.

        New ones come first where the cluster has room for one; else old ones go first.
        """
        free = self._ray.available_resources()
        room = free.get("CPU", 0) >= self.cpus and free.get("GPU", 0) >= self.gpus
        with _as_sentences():
            self._run(self._models(surge=AT_ONCE if room else 0), MODELS, None)

    def stop(self) -> None:
        """Let what runs end within the time that it has, and take everything out of the cluster."""
        if self._front is not None:
            with suppress(Exception):  # the front may be gone, or not there yet
                self._front.drain.remote().result(timeout_s=self.settings.grace + CHECKS)
        self._serve.shutdown()

    def _models(self, surge: int) -> Any:
        told = self.settings
        least, most = told.places
        scaling: dict[str, Any] = {"num_replicas": least}
        if most > least:
            scaling = {
                "autoscaling_config": {
                    "min_replicas": least,
                    "max_replicas": most,
                    "target_ongoing_requests": told.batch_size,
                    "upscale_delay_s": UPSCALE,
                    "downscale_delay_s": DOWNSCALE,
                }
            }
        return self._serve.deployment(
            name=MODEL,
            **scaling,
            ray_actor_options={"num_cpus": self.cpus, "num_gpus": self.gpus},
            max_ongoing_requests=told.batch_size * most + told.max_queue,
            graceful_shutdown_timeout_s=told.grace,
            health_check_period_s=CHECKS,
            health_check_timeout_s=max(CHECKS, told.stall),
            max_constructor_retry_count=TRIES,
            max_surge_percent=surge,
            request_router_config={"request_router_class": PlacingRouter},
        )(ModelReplica).bind(told)

    def _run(self, application: Any, name: str, route: str | None) -> Any:
        return self._serve.run(application, name=name, route_prefix=route)


@contextmanager
def _as_sentences() -> Iterator[None]:
    """Let an error of Ray's be one sentence."""
    try:
        yield
    except (ClusterError, InvalidParameter):
        raise
    except Exception as error:
        raise ClusterError(f"Ray cannot serve the model: {first_sentence(error)}.") from error
