"""Which copy of the model gets a request: the one that the front has chosen, by which prompts each knows."""

from typing import Any

from ray.serve import request_router as ray_router  # pyright: ignore[reportMissingImports]

from polydraft.server.ray import replica_worker


class PlacingRouter(ray_router.RequestRouter):
    """Send a request to the copy that it names last, or to any if that is None."""

    async def choose_replicas(
        self,
        candidate_replicas: list[ray_router.RunningReplica],
        pending_request: ray_router.PendingRequest | None = None,
    ) -> list[list[ray_router.RunningReplica]]:
        """Return the copy that a request names; where it is not there, the request ends in a `LookupError`."""
        wanted = pending_request.args[-1] if pending_request is not None and pending_request.args else None
        if wanted is None or pending_request is None:
            return [candidate_replicas]
        found = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        if not found and not pending_request.future.done():
            pending_request.future.set_exception(LookupError(wanted))
        return [found or candidate_replicas]  # of an empty list Ray would ask again and again, for what is over

    def update_replicas(self, replicas: list[ray_router.RunningReplica]) -> None:
        """Take the copies that take requests now: not those that are about to end."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ray_router.ReplicaID) -> None:
        """Drop a copy whose actor has died."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        there: Any = self.curr_replicas
        replica_worker.BOARD.put(one.unique_id for one in there)  # by its module: Ray pickles this class by value
