"""Options of `polydraft serve` alone."""

from typing import Annotated

import typer

from polydraft.catalogue import names_file
from polydraft.cli.arguments.options import DRAFTING, MODELS, OUTPUT
from polydraft.cli.arguments.values import count
from polydraft.cli.arguments.words import drafter_word, drafters_in_help, one_of, verifier_word
from polydraft.errors import InvalidParameter

ADDRESS, LIMITS = "Address", "Limits"
PLANS = ("auto", "goodput")
METRIC_LEVELS = ("none", "summary", "detailed")


def _plan(word: str | None) -> str | None:
    return None if word is None else one_of(word, PLANS)


def _rule(word: str | None) -> str | None:
    return None if word is None else verifier_word(_word_alone(word, "--verifier"))


def _drafter(word: str | None) -> str | None:
    return None if word is None else drafter_word(_word_alone(word, "--drafter"))


def _word_alone(word: str, option: str) -> str:
    if names_file(word):
        raise InvalidParameter(f"A server runs no file of rules or drafters: give {option} a word, not {word!r}.")
    return word


def _port(number: int) -> int:
    if not 0 <= number < 65536:
        raise InvalidParameter(f"--port must be a number from 0 to 65535, but is {number}.")
    return number


HostOption = Annotated[
    str, typer.Option(metavar="NAME", help="Address to listen at; 0.0.0.0 for all.", rich_help_panel=ADDRESS)
]
PortOption = Annotated[
    int, typer.Option(callback=_port, help="Port to listen at; 0 for a free one.", rich_help_panel=ADDRESS)
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="POLYDRAFT_API_KEY",
        help="Key that clients must send; may be repeated. Default: none is needed.",
        rich_help_panel=ADDRESS,
    ),
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Name by which clients may call, beside localhost and numbers; may be repeated. Default: any, but none at "
        "an address of this machine alone without a key.",
        rich_help_panel=ADDRESS,
    ),
]
ConnectionsOption = Annotated[
    int,
    typer.Option(
        "--max-connections", min=1, callback=count, help="Open connections; more get 503.", rich_help_panel=LIMITS
    ),
]
OriginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="URL",
        help="Web page from elsewhere that may call, such as https://example.org; may be repeated. Default: none.",
        rich_help_panel=ADDRESS,
    ),
]
ModelNameOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What clients call the model. Default: the target's name, without its folder.",
        rich_help_panel=MODELS,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, callback=count, help="CPU threads of the model. Default: torch's.", rich_help_panel=MODELS),
]
ServePlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=_plan,
        help="auto or goodput: a planner chooses the trees of requests without a seed. Default: fixed trees.",
        rich_help_panel=DRAFTING,
    ),
]
ServeDrafterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Who drafts: {drafters_in_help()}. Default: model if there is one, else merge; when sampling, route.",
        callback=_drafter,
        rich_help_panel=DRAFTING,
    ),
]
ServeVerifierOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=_rule,
        help="Verification rule, a word of `polydraft generate --verifier`. Default: what suits the drafter.",
        rich_help_panel=DRAFTING,
    ),
]
SlotsOption = Annotated[
    int,
    typer.Option("--batch-size", min=1, callback=count, help="Texts in progress at a time.", rich_help_panel=LIMITS),
]
QueueOption = Annotated[
    int, typer.Option("--max-queue", min=0, help="Texts that may wait; more get 429.", rich_help_panel=LIMITS)
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=2,
        callback=count,
        help="Tokens of a text with its prompt at most. Default: the model's context, at most 4096.",
        rich_help_panel=LIMITS,
    ),
]
PromptLimitOption = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens", min=1, callback=count, help="Tokens of a prompt at most.", rich_help_panel=LIMITS
    ),
]
BodyOption = Annotated[
    int, typer.Option("--max-body", min=1, callback=count, help="Bytes of a request at most.", rich_help_panel=LIMITS)
]
ChunkOption = Annotated[
    int,
    typer.Option(
        min=1,
        callback=count,
        help="Prompts are read by at most so many tokens between steps; by fewer where these take long.",
        rich_help_panel=LIMITS,
    ),
]
KeptOption = Annotated[
    int,
    typer.Option(
        "--kept-texts",
        min=0,
        help="Texts that are over and stay known, for prompts that begin like them.",
        rich_help_panel=LIMITS,
    ),
]
StallOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Seconds without a sign of life from the model's process, or in one step, after which it is started anew.",
        rich_help_panel=LIMITS,
    ),
]
DeadlineOption = Annotated[
    float, typer.Option(min=0.001, help="Seconds that a request may take.", rich_help_panel=LIMITS)
]
GraceOption = Annotated[
    float, typer.Option(min=0, help="Seconds for running requests when told to stop.", rich_help_panel=LIMITS)
]
LogPromptsOption = Annotated[
    bool, typer.Option("--log-prompts", help="Write prompts and texts to the log.", rich_help_panel=OUTPUT)
]
DraftMetricsOption = Annotated[
    str,
    typer.Option(
        "--per-request-spec-decode-metrics",
        metavar="LEVEL",
        callback=lambda word: one_of(word, METRIC_LEVELS),
        help="What answers tell of drafts where a request does not say: none, summary, or detailed (each step too).",
        rich_help_panel=OUTPUT,
    ),
]
VllmOption = Annotated[
    bool, typer.Option("--vllm-metrics", help="Tell metrics under vllm: too.", rich_help_panel=OUTPUT)
]
