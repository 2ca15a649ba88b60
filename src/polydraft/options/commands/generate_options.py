"""Options of the commands that write texts: `polydraft generate` and `polydraft chat`."""

from dataclasses import dataclass, fields
from pathlib import Path

from polydraft.options.commands.option_groups import (
    ADDRESS,
    CHAT_TEMPLATE,
    DRAFT_DEVICE,
    DRAFTING,
    FILE_TO_READ,
    FILES,
    JSON,
    MODELS,
    NEW_TOKENS,
    OUTPUT,
    PARALLEL,
    PROMPTS,
    QUIET,
    RAY,
    REPLICAS,
    SEED,
    TARGET,
    TextOptions,
    check_ray,
)
from polydraft.options.option import LARGEST_SEED, count, option
from polydraft.options.sampling_options import SAMPLING
from polydraft.options.value_checks import stop_strings, to_write

MESSAGES = FILE_TO_READ.but(flag="--input")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TextOptions):
    """One call of `polydraft generate`."""

    prompt: str | None = option(None, 'The prompt; "-" reads standard input.', argument=True)
    stop: tuple[str, ...] = option(
        (), "Stop after this string; may be repeated.", SAMPLING, metavar="TEXT", check=stop_strings
    )
    json_schema: str | None = option(
        None,
        "Let the text be a JSON value of this schema: a file, or the schema itself.",
        SAMPLING,
        metavar="FILE|TEXT",
    )
    compact: bool = option(False, "Leave the blanks of --json-schema's JSON out.", SAMPLING)
    regex: str | None = option(None, "Let the text match this, as a whole.", SAMPLING, metavar="PATTERN")
    grammar: Path | None = FILE_TO_READ.but(help="Let the text follow this Lark grammar.", panel=SAMPLING).usually(None)
    seed: int | None = SEED.but(help="Fixes the text.", panel=SAMPLING).usually(None)
    max_new_tokens: int = NEW_TOKENS.usually(128)
    as_json: bool = JSON.usually(False)
    quiet: bool = QUIET.usually(False)
    compare: bool = option(False, "Measure the speed-up over plain decoding.", OUTPUT)
    plan: Path | None = FILE_TO_READ.but(
        help="A file from `polydraft tune`; or auto, goodput: learn by doing.", panel=DRAFTING
    ).usually(None)
    compiled: bool = option(
        False, "Compile the models' passes first; pays on GPUs, for long texts.", MODELS, flag="--compile"
    )
    parallel: str | None = PARALLEL.usually(None)
    draft_device: str | None = DRAFT_DEVICE.usually(None)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    input_file: Path | None = MESSAGES.but(
        help="A file of prompts: JSON lines, or plain text with one a line.", panel=FILES
    ).usually(None)
    output: Path | None = option(
        None, "File for the texts of --input; the same call goes on.", FILES, metavar="FILE", check=to_write
    )
    batch_size: int | None = count(None, "Texts of --input at a time. Default: 8.", FILES)
    ray: bool = RAY.but(help="Share --input among copies of the models in a Ray cluster.", panel=FILES).usually(False)
    address: str | None = ADDRESS.but(panel=FILES).usually(None)
    replicas: str | None = REPLICAS.but(panel=FILES).usually(None)

    def __post_init__(self) -> None:
        check_ray(ray=self.ray, address=self.address, replicas=self.replicas)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TextOptions):
    """One call of `polydraft chat`."""

    target: str | None = TARGET.but(help="Chat model: folder, .gguf file or hub name. Default: smollm2.").usually(None)
    seed: int | None = option(
        None,
        "Fixes the conversation: the seed of the first turn, the next one of the second, ...",
        SAMPLING,
        least=0,
        largest=LARGEST_SEED,
    )
    max_new_tokens: int = NEW_TOKENS.but(help="Most tokens of an answer.").usually(512)
    system: str | None = option(
        None, "The system message. Default: what the model's template has.", PROMPTS, metavar="TEXT"
    )
    input_file: Path | None = MESSAGES.but(
        help="A file of messages to answer in turn: JSON lines, or plain text with one a line.", panel=PROMPTS
    ).usually(None)
    as_json: bool = JSON.but(help="Print one JSON object an answer and nothing else.").usually(False)
    quiet: bool = QUIET.but(help="Print no greeting and no lines about answers.").usually(False)

    @property
    def of_a_text(self) -> GenerateOptions:
        """The same options for one text."""
        shared = {one.name: getattr(self, one.name) for one in fields(TextOptions)}
        return GenerateOptions(**shared, seed=self.seed, max_new_tokens=self.max_new_tokens)
