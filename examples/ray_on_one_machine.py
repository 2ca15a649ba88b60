"""Serve from a Ray cluster of this machine, with two copies of the model, and end one of them: no request is lost.

    pip install "ray[serve,data]>=2.60,<3"    # and the extra `serve` of polydraft
    python examples/ray_on_one_machine.py

In a cluster of several machines `polydraft serve --ray --address HOST:PORT` does the same, with copies on all of them.
"""

import argparse
import json
import threading
import urllib.request

import ray
from ray.util import list_named_actors

from polydraft.cluster import joined
from polydraft.server import Settings
from polydraft.server.ray.deploying import RayServer


def main() -> None:
    """Stream two texts, end a copy of the model meanwhile, and tell what was asked for again."""
    parser = argparse.ArgumentParser(description="Serve from a Ray cluster of this machine.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    with joined(None) as cluster:
        settings = Settings(ray=True, replicas="2", port=given.port)
        server = RayServer(cluster, settings)
        server.check()
        server.start()
        address = f"http://127.0.0.1:{given.port}"
        try:
            texts = {seed: "" for seed in (1, 2)}
            clients = [threading.Thread(target=stream, args=(address, seed, given.max_tokens, texts)) for seed in texts]
            for client in clients:
                client.start()
            ray.kill(a_copy())
            for client in clients:
                client.join()
            for text in texts.values():
                print(text)
            metrics = urllib.request.urlopen(f"{address}/metrics").read().decode()
            print(*(line for line in metrics.splitlines() if line.startswith("polydraft:worker")), sep="\n")
        finally:
            server.stop()


def stream(address: str, seed: int, most: int, texts: dict[int, str]) -> None:
    """Read a stream into the texts."""
    body = {"prompt": "def fib(n):\n", "max_tokens": most, "temperature": 0.8, "seed": seed, "stream": True}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                texts[seed] += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


def a_copy() -> ray.actor.ActorHandle:
    """Return the actor of one copy of the model."""
    named = next(one for one in list_named_actors(all_namespaces=True) if "ModelReplica" in one["name"])
    return ray.get_actor(**named)


if __name__ == "__main__":
    main()
