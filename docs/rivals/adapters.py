"""Write texts with one tool, a line of JSON for each: run by `lab/rivals.py` in the tool's own environment.

    python docs/rivals/adapters.py TOOL WEIGHTS FOLDER THREADS

Every line of the input asks for a text: arm, temperature, tokens of the prompt, how many are new, a seed. Every line of
the output tells one: its tokens, the seconds that it took, and those to its first token, or null where the tool is
silent about them. The first line tells the versions, once the model is loaded. End tokens do not end a text, and
sampling is from the whole vocabulary. A class imports its own tool alone, so that nothing else is loaded beside it.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

PLAIN, DRAFTS = "plain", "drafts"
"""The two arms of every tool: without drafts, and with those of its own that need no other model."""
ARMS = (PLAIN, DRAFTS)
clock = time.perf_counter
Written = tuple[Sequence[int], float | None]
"""New tokens, and seconds to the first of them where they are known."""


class Adapter(Protocol):
    """A tool with its model loaded."""

    packages: tuple[str, ...]

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        ...


class Polydraft:
    """polydraft: a folder or "smollm2"; the default drafts with the head that ships for that name."""

    packages = ("polydraft", "torch", "transformers")

    def __init__(self, weights: str, folder: str, threads: int) -> None:
        import torch

        import polydraft

        torch.set_num_threads(threads)
        bits = weights if weights in ("int8", "int4") else None
        self.pair = polydraft.load(folder, dtype="bfloat16" if bits else weights, weights=bits)
        self.stream = polydraft.stream

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        begin, first = clock(), None
        drafter = "none" if arm == PLAIN else self.pair.draft
        options = asked(self.pair.target, temperature, new)
        run = self.stream(self.pair.target, ids, drafter=drafter, seed=seed, **options)
        for _ in run:
            first = first or clock() - begin
        return run.new_tokens[0], first


class Transformers:
    """transformers alone, on a model that polydraft has not touched; it drafts by prompt lookup of ten tokens."""

    packages = ("transformers", "torch")

    def __init__(self, weights: str, folder: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).eval()
        self.begin, self.calls, self.first = 0.0, 0, None

    def put(self, tokens: object) -> None:
        """Take note of the first tokens; before them the prompt comes."""
        self.calls += 1
        self.first = clock() - self.begin if self.calls == 2 else self.first

    def end(self) -> None:
        """Do nothing at the end."""

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        assert "polydraft" not in sys.modules
        self.torch.manual_seed(seed)
        self.begin, self.calls, self.first = clock(), 0, None
        lookup = {} if arm == PLAIN else {"prompt_lookup_num_tokens": 10}
        prompt = self.torch.tensor([ids])
        options = asked(self.model, temperature, new) | lookup
        found = self.model.generate(prompt, attention_mask=self.torch.ones_like(prompt), streamer=self, **options)
        return found[0, len(ids) :].tolist(), self.first


def asked(model: Any, temperature: float, new: int) -> dict[str, Any]:
    """Return arguments of `generate`; the id of the end is set to one that no token has."""
    nothing = model.config.get_text_config().vocab_size
    options = {"max_new_tokens": new, "eos_token_id": nothing, "pad_token_id": nothing, "do_sample": temperature > 0}
    return options | ({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {})


class OpenVino:
    """OpenVINO GenAI; it drafts by prompt lookup of three tokens. Prompts are not kept for later ones."""

    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf")

    def __init__(self, weights: str, folder: str, threads: int) -> None:
        import openvino_genai

        self.library = openvino_genai
        hint = "f32" if weights == "float32" else "bf16"
        own = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, 1 << 20
        load = openvino_genai.LLMPipeline
        self.pipes = {PLAIN: load(folder, "CPU", scheduler_config=scheduler, **own)}
        self.pipes[DRAFTS] = load(folder, "CPU", scheduler_config=scheduler, prompt_lookup=True, **own)

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        import numpy as np
        import openvino

        config = self.library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = new, True, False
        config.do_sample, config.rng_seed = temperature > 0, seed
        if temperature > 0:
            config.temperature, config.top_p = temperature, 1.0
        if arm == DRAFTS:
            config.num_assistant_tokens, config.max_ngram_size = 3, 3
        found = self.pipes[arm].generate(openvino.Tensor(np.array([ids], dtype=np.int64)), config)
        return found.tokens[0], found.perf_metrics.get_ttft().mean / 1000


class OnnxRuntime:
    """onnxruntime-genai; it drafts by n-grams of three tokens, four of them. A token of the vocabulary must end a text:
    here it is the last one, which is rare.
    """

    packages = ("onnxruntime-genai", "onnxruntime")

    def __init__(self, weights: str, folder: str, threads: int) -> None:
        import onnxruntime_genai

        self.library = onnxruntime_genai
        rarest = json.loads(Path(folder, "genai_config.json").read_text())["model"]["vocab_size"] - 1
        config = onnxruntime_genai.Config(folder)
        session = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"eos_token_id": rarest, "decoder": session}}))
        self.model = onnxruntime_genai.Model(config)

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        begin, first = clock(), None
        params = self.library.GeneratorParams(self.model)
        own = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "random_seed": seed} if temperature > 0 else {}
        params.set_search_options(max_length=len(ids) + new, do_sample=temperature > 0, **own)
        if arm == DRAFTS:
            params.set_speculative_options(ngram_size=3, max_draft_tokens=4)
        generator = self.library.Generator(self.model, params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
            first = first or clock() - begin
        return generator.get_sequence(0)[len(ids) :].tolist(), first


class LlamaCpp:
    """llama.cpp: two of its servers, one of which drafts by n-grams of three tokens, four of them."""

    packages = ()

    def __init__(self, weights: str, folder: str, threads: int) -> None:
        program = Path(folder).parent / "build" / "bin" / "llama-server"
        lookup = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4")
        self.places = dict[str, str]()
        for arm, own in {PLAIN: (), DRAFTS: lookup}.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            usual = ("-m", folder, "-t", str(threads), "-np", "1", "-c", "4096", "--port", str(port))
            server = subprocess.Popen(
                [str(program), *usual, *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            atexit.register(server.kill)
            self.places[arm] = f"http://127.0.0.1:{port}"
            self.wait(server, self.places[arm])

    def wait(self, server: subprocess.Popen[bytes], place: str) -> None:
        """Wait until a server has loaded its model.

        Raises:
            RuntimeError: it ended instead.
        """
        while server.poll() is None:
            try:
                return urllib.request.urlopen(f"{place}/health").close()
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"llama-server ended with {server.returncode}")

    def write(self, arm: str, temperature: float, ids: list[int], new: int, seed: int) -> Written:
        """Write a text."""
        body = {"prompt": ids, "n_predict": new, "temperature": temperature, "seed": seed, "return_tokens": True}
        body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(f"{self.places[arm]}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        return found["tokens"], found["timings"]["prompt_ms"] / 1000


ADAPTERS = {
    "polydraft": Polydraft,
    "transformers": Transformers,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    """Load a tool and write what is asked for."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    tool, weights, folder, threads = sys.argv[1:]
    adapter: Adapter = ADAPTERS[tool](weights, folder, int(threads))
    print(json.dumps({name: version(name) for name in adapter.packages}), file=out, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        begin = clock()
        tokens, first = adapter.write(**given)
        told = {"tokens": list(map(int, tokens)), "seconds": clock() - begin, "first": first}
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
