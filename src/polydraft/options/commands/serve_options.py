"""Options of `polydraft serve`: what an operator decides about a server, as plain values, which a worker is sent."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polydraft.errors import InvalidParameter
from polydraft.options.commands.option_groups import (
    ADDRESS,
    DEVICE,
    DRAFT,
    DRAFT_DEVICE,
    DRAFTER,
    DRAFTING,
    DTYPE,
    MODELS,
    OUTPUT,
    PARALLEL,
    RAY,
    REPLICAS,
    TARGET,
    TREE,
    VERIFIER,
    WEIGHTS,
    check_ray,
    replica_range,
)
from polydraft.options.option import check, count, option
from polydraft.options.value_checks import folder_to_write

NETWORK, LIMITS, LEARNING = "Address", "Limits", "Learning"
NONE, SUMMARY, DETAILED = "none", "summary", "detailed"
LEVELS = (NONE, SUMMARY, DETAILED)
"""How much is told of a request's drafts: nothing, counts, or counts and every step."""
PLANS = ("auto", "goodput")


def _port(number: int) -> int:
    if not 0 <= number < 65536:
        raise InvalidParameter(f"--port must be a number from 0 to 65535, but is {number}.")
    return number


def folder_of_versions(path: str) -> str:
    """Return the place of a folder to fill, as text.

    Raises:
        InvalidParameter: no folder can be made there, and why.
    """
    return str(folder_to_write(Path(path)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that determines a server; `apart` tells whether its model has a process of its own, made again if it dies.

    Raises:
        InvalidParameter: a number is too small, a word none of those there are, a draft without a target, an API key
            that is empty or not of ASCII characters, or options that do not go together.
    """

    target: str | None = TARGET.usually(None)
    draft: str | None = DRAFT.usually(None)
    drafter: str | None = DRAFTER.but(
        help="Who drafts: {words}. Default: model if there is one, else merge; when sampling, route.",
        words="served drafter",
    ).usually(None)
    verifier: str | None = VERIFIER.but(
        help="Verification rule, a word of `polydraft generate --verifier`. Default: what suits the drafter.",
        words="served verifier",
    ).usually(None)
    tree: str | None = TREE.usually(None)
    plan: str | None = option(
        None,
        "auto or goodput: a planner chooses the trees of requests without a seed. Default: fixed trees.",
        DRAFTING,
        metavar="NAME",
        words=PLANS,
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all.", NETWORK, metavar="NAME")
    port: int = option(8000, "Port to listen at; 0 for a free one.", NETWORK, check=_port)
    keys: tuple[str, ...] = option(
        (),
        "Key that clients must send; may be repeated. Default: none is needed.",
        NETWORK,
        flag="--api-key",
        metavar="KEY",
        variable="POLYDRAFT_API_KEY",
    )
    hosts: tuple[str, ...] = option(
        (),
        "Name by which clients may call, beside localhost and numbers; may be repeated. Default: any, but none at "
        "an address of this machine alone without a key.",
        NETWORK,
        flag="--allowed-host",
        metavar="NAME",
    )
    origins: tuple[str, ...] = option(
        (),
        "Web page from elsewhere that may call, such as https://example.org; may be repeated. Default: none.",
        NETWORK,
        flag="--cors-origin",
        metavar="URL",
    )
    model_name: str | None = option(
        None, "What clients call the model. Default: the target's name, without its folder.", MODELS, metavar="NAME"
    )
    tool_format: str | None = option(
        None,
        "How the model writes calls of tools, such as hermes or llama (docs/tools.md). Default: what its chat template "
        "says.",
        MODELS,
        metavar="NAME",
    )
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    weights: str | None = WEIGHTS.usually(None)
    parallel: str | None = PARALLEL.usually(None)
    draft_device: str | None = DRAFT_DEVICE.usually(None)
    workers: int = count(1, "Processes with the model, which share the requests and the threads.", MODELS)
    threads: int | None = count(
        None,
        "CPU threads of all models together, or, with --ray, of each. Default: torch's, or, with --ray, 1.",
        MODELS,
    )
    ray: bool = RAY.usually(False)
    address: str | None = ADDRESS.usually(None)
    replicas: str | None = REPLICAS.usually(None)
    batch_size: int = count(8, "Texts that a worker has in progress at a time.", LIMITS)
    max_queue: int = option(128, "Texts that may wait; more get 429.", LIMITS, least=0)
    max_connections: int = count(1000, "Open connections; more get 503.", LIMITS)
    max_length: int | None = count(
        None, "Tokens of a text with its prompt at most. Default: the model's context, at most 4096.", LIMITS, least=2
    )
    max_prompt_tokens: int | None = count(None, "Tokens of a prompt at most.", LIMITS)
    max_body: int = count(4 << 20, "Bytes of a request at most.", LIMITS)
    chunk: int = count(
        256, "Prompts are read by at most so many tokens between steps; by fewer where these take long.", LIMITS
    )
    kept_texts: int = option(
        8, "Texts that are over and stay known, for prompts that begin like them.", LIMITS, least=0
    )
    stall: float = option(
        120.0,
        "Seconds without a sign of life from the model's process, or in one step, after which it is started anew.",
        LIMITS,
        least=1,
    )
    retries: int = option(
        2,
        "How often a request is asked again whose worker ended while it was at it, the last time with that worker "
        "for itself.",
        LIMITS,
        least=0,
    )
    deadline: float = option(600.0, "Seconds that a request may take.", LIMITS, least=0.001)
    grace: float = option(30.0, "Seconds for running requests when told to stop.", LIMITS, least=0)
    learn: str | None = option(
        None,
        "Let the draft model or head learn from finished texts, into this folder (docs/learning.md). Default: nothing "
        "is learnt.",
        LEARNING,
        metavar="FOLDER",
        check=folder_of_versions,
    )
    learn_bytes: int | None = count(
        None,
        "Bytes of the texts that are kept in memory to learn from and to choose by. Default: 256 MiB, or more where "
        "400 texts of 512 tokens take more.",
        LEARNING,
    )
    unlearnt_keys: tuple[str, ...] = option(
        (),
        "Key among those of --api-key whose texts are not learnt from; may be repeated.",
        LEARNING,
        flag="--unlearnt-key",
        metavar="KEY",
    )
    prompts_logged: bool = option(False, "Write prompts and texts to the log.", OUTPUT, flag="--log-prompts")
    vllm_metrics: bool = option(False, "Tell metrics under vllm: too.", OUTPUT)
    draft_metrics: str = option(
        SUMMARY,
        "What answers tell of drafts where a request does not say: none, summary, or detailed (each step too).",
        OUTPUT,
        flag="--per-request-spec-decode-metrics",
        metavar="LEVEL",
        words=LEVELS,
    )
    apart: bool = True

    def __post_init__(self) -> None:
        check(self)
        if self.draft and not self.target:
            raise InvalidParameter(f"The draft {self.draft!r} needs a target; that of the embedded pair is 'pair'.")
        if any(not key or not key.isascii() for key in self.keys):
            raise InvalidParameter("API keys must be ASCII characters, at least one.")
        check_ray(ray=self.ray, address=self.address, replicas=self.replicas)
        if self.ray:
            self._check_places()
        self._check_learning()

    def _check_places(self) -> None:
        """Check that nothing is said of where models are that a Ray cluster decides."""
        if self.workers > 1:
            raise InvalidParameter("--workers counts processes of one machine: with --ray give --replicas.")
        if self.parallel is not None:
            raise InvalidParameter("With --ray every copy of the model is whole, on one device: leave --parallel out.")
        for name, device in {"--device": self.device, "--draft-device": self.draft_device}.items():
            if device and ":" in device:
                raise InvalidParameter(f"With --ray the cluster chooses the GPU, not {name} {device}: write cuda.")

    def _check_learning(self) -> None:
        if self.learn is None:
            if self.unlearnt_keys or self.learn_bytes is not None:
                name = "--unlearnt-key" if self.unlearnt_keys else "--learn-bytes"
                raise InvalidParameter(
                    f"{name} is for a server that learns: name a folder by --learn, or leave it out."
                )
            return
        if self.plan is not None:
            raise InvalidParameter(
                f"--plan {self.plan} knows what one draft's weights bring, and --learn changes them: leave one of them "
                "out."
            )
        if self.ray:
            raise InvalidParameter("--learn keeps versions on one machine: leave --ray or --learn out.")
        if self.parallel is not None:
            raise InvalidParameter("--learn is for a target in one process: leave --parallel or --learn out.")
        if any(key not in self.keys for key in self.unlearnt_keys):
            raise InvalidParameter("--unlearnt-key must be one of the keys of --api-key.")

    @cached_property
    def name(self) -> str:
        """What clients call the model: of a folder or file the last part, since where it lies is nobody's business."""
        if self.model_name or not self.target:
            return self.model_name or "polydraft-embedded"
        place = Path(self.target)
        return place.resolve().name if place.exists() or place.is_absolute() else self.target

    @property
    def places(self) -> tuple[int, int]:
        """How many workers there are, at least and at most."""
        return replica_range(self.replicas) if self.ray else (self.workers, self.workers)

    @property
    def drafter_word(self) -> str | None:
        """The word of who drafts, without the folder that may stand behind it."""
        return self.drafter and self.drafter.partition(":")[0]
