"""Prometheus metrics, under vLLM's names behind our own prefix, and behind vLLM's where that is asked for."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from polydraft.server.wire.answers import FINISHES

OURS, THEIRS = "polydraft", "vllm"
WAITS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LABEL = "model_name"
MINUTE = 60.0
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens written.",
    "spec_decode_num_drafts": "Steps of texts in which something was drafted.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "prefix_cache_queries": "Tokens of prompts that were looked for among those known.",
    "prefix_cache_hits": "Tokens of prompts that were known.",
    "worker_lost": "Workers that ended by themselves, or hung and were killed.",
}
LABELLED = {
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens by depth.", ("position",)),
    "request_success": ("Texts that came to an end.", ("finished_reason",)),
    "request_refused": ("Requests that were refused or failed, by HTTP's number.", ("status",)),
    "request_resent": ("Requests and texts asked for again: by their seed, or to go on by the law.", ("by",)),
    "tool_calls": ("Calls of tools, and whether they were sound.", ("format", "sound")),
    "request_verifier": ("Requests that were taken, by the rule that verifies drafts.", ("verifier", "lossless")),
}
GAUGES = {
    "workers_ready": "Workers whose model is loaded.",
    "num_requests_running": "Texts in progress.",
    "num_requests_waiting": "Texts that wait.",
    "kv_cache_usage_perc": "Share (0 to 1) of the key slots for texts that hold tokens of texts in progress.",
}
LEARNING_COUNTERS = {
    "learn_texts": "Finished texts that the learner took.",
    "learn_steps": "Steps that the learner took.",
    "learn_seconds": "Seconds that it learnt and compared.",
    "learn_looks": "Comparisons of weights.",
    "learn_swaps": "Comparisons after which other weights were used, since they are better.",
    "learn_roll_backs": "Comparisons after which the weights of before were used again.",
    "learn_restarts": "Times that the learner was started anew.",
}
LEARNING_GAUGES = {
    "learn_version": "The number of the version in use; 0 before the first swap.",
    "learn_look": "The number of the last comparison.",
    "learn_bytes": "Bytes of the texts that are kept to learn from and to choose by.",
}
"""Those of a server that learns."""
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the request to its first token.", WAITS),
    "inter_token_latency_seconds": ("Between steps that brought a text something, for each token of them.", GAPS),
    "time_per_output_token_seconds": ("The same under the name of before.", GAPS),
    "request_time_per_output_token_seconds": ("A request's time behind its first token, for each token.", GAPS),
    "e2e_request_latency_seconds": ("From the request to its end.", WHOLE),
    "request_queue_time_seconds": ("In the queue.", WHOLE),
    "iteration_tokens_total": ("Tokens of a step: new ones, and prompts of texts that have their first.", STEPS),
    "request_prompt_tokens": ("Tokens of a request's prompts.", SIZES),
    "request_generation_tokens": ("Tokens of a text.", SIZES),
    "request_spec_decode_acceptance_rate": ("Share (0 to 1) of a request's drafts that were accepted.", SHARES),
}
PER_CALL = "tokens_per_call"


class LastMinute:
    """The mean of what was noted in the last minute, in seconds' time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = deque[tuple[int, list[int]]]()  # of each second: how much, and how often

    def note(self, count: int) -> None:
        """Note something."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._forget(now)
            self._seconds.append((now, [0, 0]))
        sums = self._seconds[-1][1]
        sums[0] += count
        sums[1] += 1

    def mean(self) -> float:
        """Return the mean; NaN of nothing."""
        self._forget(int(self._clock()))
        total, often = (sum(sums[part] for _, sums in tuple(self._seconds)) for part in range(2))
        return total / often if often else math.nan

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - MINUTE:
            self._seconds.popleft()


class Metrics:
    """The metrics of one app, in a registry of its own.

    With `vllm` they are told under vLLM's names too; with `learns` there are those of learning.
    """

    def __init__(self, model: str, *, vllm: bool = False, learns: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._named: dict[str, list[Any]] = {}
        self.calls = LastMinute()
        self._counters = COUNTERS | (LEARNING_COUNTERS if learns else {})
        self._gauges = GAUGES | (LEARNING_GAUGES if learns else {})
        for prefix in (OURS, THEIRS) if vllm else (OURS,):
            self._make(prefix)

    def _make(self, prefix: str) -> None:
        def keep(name: str, one: Any) -> None:
            self._named.setdefault(name, []).append(one)

        labels, registry = [LABEL], self.registry
        for name, said in self._counters.items():
            keep(name, Counter(f"{prefix}:{name}", said, labels, registry=registry).labels(self._model))
        for name, said in self._gauges.items():
            keep(name, Gauge(f"{prefix}:{name}", said, labels, registry=registry).labels(self._model))
        said = "New tokens of a text in a pass of the target, over the last minute; NaN if there was none."
        per_call = Gauge(f"{prefix}:{PER_CALL}", said, labels, registry=registry).labels(self._model)
        per_call.set_function(self.calls.mean)
        for name, (said, buckets) in HISTOGRAMS.items():
            one = Histogram(f"{prefix}:{name}", said, labels, registry=registry, buckets=buckets)
            keep(name, one.labels(self._model))
        for name, (said, more) in LABELLED.items():
            keep(name, Counter(f"{prefix}:{name}", said, [LABEL, *more], registry=registry))

    def add(self, name: str, value: float = 1) -> None:
        """Add to a counter."""
        self._each(name, lambda one: one.inc(value))

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._each(name, lambda one: one.set(value))

    def see(self, name: str, value: float) -> None:
        """Put a value into a histogram."""
        self._each(name, lambda one: one.observe(value))

    def add_by(self, name: str, *labels: object) -> None:
        """Add one to a counter with labels."""
        self._each(name, lambda one: one.labels(self._model, *map(str, labels)).inc())

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(_Values(self.registry))

    def _each(self, name: str, do: Callable[[Any], None]) -> None:
        for one in self._named[name]:
            do(one)


class _Values(CollectorRegistry):
    """A registry's metrics without the times at which counters began.

    `vllm bench serve` takes every line that begins like a counter for one, and would add these times to it. vLLM leaves
    them out for all registries of a process, which belong to others too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Timing:
    """The times of one request's texts, put into the metrics as they come."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._asked = time.perf_counter()
        self._last: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._left, self._drafted, self._accepted = 0, 0, 0

    @property
    def seconds(self) -> float:
        """How long ago the request came."""
        return time.perf_counter() - self._asked

    def begun(self, said: Mapping[str, Any]) -> None:
        """Note that the request was taken."""
        tokens, self._left = sum(said["prompt_tokens"]), len(said["seeds"])
        self._metrics.add("prompt_tokens", tokens)
        self._metrics.see("request_prompt_tokens", tokens)
        self._metrics.add_by("request_verifier", said["verifier"] or "none", str(said["lossless"]).lower())

    def joined(self, said: Mapping[str, Any], prompt: int) -> None:
        """Note that a text is read now."""
        self._metrics.see("request_queue_time_seconds", self.seconds)
        self._metrics.add("prefix_cache_queries", prompt)
        self._metrics.add("prefix_cache_hits", said["cached"])

    def gained(self, said: Mapping[str, Any]) -> None:
        """Note what a step brought a text."""
        metrics, number, count, now = self._metrics, said["number"], len(said["tokens"]), time.perf_counter()
        metrics.add("generation_tokens", count)
        self._tokens[number] = self._tokens.get(number, 0) + count
        if number in self._last and count:
            gap = (now - self._last[number]) / count
            metrics.see("inter_token_latency_seconds", gap)
            metrics.see("time_per_output_token_seconds", gap)
        elif count:
            metrics.see("time_to_first_token_seconds", now - self._asked)
            self._first[number] = now
        self._last[number] = now
        if count:
            metrics.calls.note(count)
        self._drafted, self._accepted = self._drafted + said["drafted"], self._accepted + said["accepted"]
        if said["drafted"]:
            metrics.add("spec_decode_num_drafts")
            metrics.add("spec_decode_num_draft_tokens", said["drafted"])
            metrics.add("spec_decode_num_accepted_tokens", said["accepted"])
            for depth in range(said["accepted"]):
                metrics.add_by("spec_decode_num_accepted_tokens_per_pos", depth)
        for one in said.get("events", ()):
            if one.kind == "end":
                metrics.add_by("tool_calls", said["format"], str(one.sound).lower())
        if said["finish"]:
            self._ended(number, said["finish"], now)

    def _ended(self, number: int, finish: str, now: float) -> None:
        metrics, tokens = self._metrics, self._tokens[number]
        metrics.add_by("request_success", FINISHES[finish])
        metrics.see("e2e_request_latency_seconds", now - self._asked)
        metrics.see("request_generation_tokens", tokens)
        if tokens > 1 and number in self._first:
            metrics.see("request_time_per_output_token_seconds", (now - self._first[number]) / (tokens - 1))
        self._left -= 1
        if not self._left and self._drafted:
            metrics.see("request_spec_decode_acceptance_rate", self._accepted / self._drafted)
