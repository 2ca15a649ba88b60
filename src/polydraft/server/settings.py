"""What an operator decides about a server: plain values, which a worker process is sent."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polydraft.errors import InvalidParameter

MIB = 1 << 20
NONE, SUMMARY, DETAILED = "none", "summary", "detailed"
LEVELS = (NONE, SUMMARY, DETAILED)
"""How much is told of a request's drafts: nothing, counts, or counts and every step."""


@dataclass(frozen=True)
class Settings:
    """All that determines a server but its address.

    Args:
        target: the model, as for `polydraft.load`; None for the embedded pair.
        draft: its draft model or head; None for what ships with it, if anything.
        drafter, verifier, tree: the words of who drafts, of the rule and of the trees where a request names none; None
            for what suits the request's temperature.
        plan: "auto" or "goodput": a planner chooses the trees of requests without a seed that name nothing themselves.
        dtype, device: as for `polydraft.load`.
        model_name: what clients call the model; None for the target's name, without its folder.
        batch_size: texts in progress at a time.
        max_queue: texts that may wait beside them; more are answered with 429.
        max_length: tokens of a text with its prompt at most; None for the model's context, but no more than 4,096.
        max_prompt_tokens: tokens of a prompt at most; None for what `max_length` leaves.
        max_body: bytes of a request at most.
        chunk: prompts are read by at most so many tokens at a time; beside texts in progress by fewer, where so many
            would take longer than two steps.
        stall: seconds without a sign of life from the model's process, or in one step of it, after which it is killed;
            a worker that is not apart is not watched.
        deadline: seconds that a request may take, with its time in the queue.
        grace: seconds that running requests have when the server is told to stop.
        keys: what clients must send one of, as `Authorization: Bearer KEY`; none for everybody.
        hosts: names under which clients may call, beside localhost and addresses in numbers; none for any. A page from
            elsewhere whose name is made to mean this machine is then refused.
        origins: web pages from elsewhere that may call, such as "https://example.org"; "*" for all.
        prompts_logged: whether logs hold the text of prompts.
        vllm_metrics: whether metrics are told under `vllm:` too.
        draft_metrics: one of `LEVELS`: what is told of drafts where a request says nothing.
        apart: whether the model has a process of its own, which is started again when it dies.
        threads: CPU threads of the model; None for torch's default.
        kept_texts: how many texts that are over the target remembers, for prompts that begin like them.
    """

    target: str | None = None
    draft: str | None = None
    drafter: str | None = None
    verifier: str | None = None
    tree: str | None = None
    plan: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    model_name: str | None = None
    batch_size: int = 8
    max_queue: int = 128
    max_length: int | None = None
    max_prompt_tokens: int | None = None
    max_body: int = 4 * MIB
    chunk: int = 256
    stall: float = 120.0
    deadline: float = 600.0
    grace: float = 30.0
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    prompts_logged: bool = False
    vllm_metrics: bool = False
    draft_metrics: str = SUMMARY
    apart: bool = True
    threads: int | None = None
    kept_texts: int = 8

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "max_queue": 0, "max_length": 2, "max_prompt_tokens": 1, "max_body": 1, "chunk": 1}
        for name, most in {**least, "stall": 1, "deadline": 0.001, "grace": 0, "kept_texts": 0, "threads": 1}.items():
            value = getattr(self, name)
            if value is not None and not value >= most:
                raise InvalidParameter(f"{name} must be at least {most}, but is {value}.")
        if self.draft_metrics not in LEVELS:
            raise InvalidParameter(f"draft_metrics must be one of {', '.join(LEVELS)}, but is {self.draft_metrics!r}.")
        if self.draft and not self.target:
            raise InvalidParameter(f"The draft {self.draft!r} needs a target; that of the embedded pair is 'pair'.")
        if any(not key or not key.isascii() for key in self.keys):
            raise InvalidParameter("API keys must be ASCII characters, at least one.")

    @cached_property
    def name(self) -> str:
        """What clients call the model: of a folder or file the last part, since where it lies is nobody's business."""
        if self.model_name or not self.target:
            return self.model_name or "polydraft-embedded"
        place = Path(self.target)
        return place.resolve().name if place.exists() or place.is_absolute() else self.target

    @property
    def drafter_word(self) -> str | None:
        """The word of who drafts, without the folder that may stand behind it."""
        return self.drafter and self.drafter.partition(":")[0]
