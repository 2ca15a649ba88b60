"""Start a server, ask it as an OpenAI client does, and end it.

    pip install "openai>=1.60"                # and the extra `serve` of polydraft
    python examples/server_and_client.py

Against a server that runs already, the part from `OpenAI(...)` on is all there is to do.
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI


def main() -> None:
    """Stream a text, and tell what drafts brought."""
    with socket.socket() as free:  # a port that nobody uses
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "polydraft", "serve", "--port", str(port)])
    try:
        wait(address, server)
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        asked = {"model": "polydraft-embedded", "prompt": "def fib(n):\n", "max_tokens": 24, "temperature": 0.8}
        for event in client.completions.create(**asked, seed=7, stream=True):
            print("".join(choice.text for choice in event.choices), end="", flush=True)
        answer = client.completions.create(**asked, seed=7)
        print(f"\n{answer.metrics['speculative_decoding']['tokens_per_call']} tokens per pass of the target")
    finally:
        server.terminate()
        server.wait()


def wait(address: str, server: subprocess.Popen) -> None:
    """Wait until the server takes requests, which it does once its model is loaded."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health").close()
            return
        except urllib.error.URLError:  # it does not listen yet, or says that it is not ready
            time.sleep(0.1)
    sys.exit("The server has ended.")


if __name__ == "__main__":
    main()
