"""Options of the commands that measure and prove: demo, conformance, models, tune, bench and report."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.options.commands.option_groups import (
    CHAT_TEMPLATE,
    DEVICE,
    DRAFTER,
    DRAFTING,
    DTYPE,
    EXCERPT,
    FILE_TO_READ,
    FOLDER,
    JSON,
    JSON_LINES,
    LIMIT,
    MEASURING,
    OUTPUT,
    PROMPT_FILES,
    RESULTS_ALONE,
    SEED,
    TARGET,
    ClusterOptions,
    ModelOptions,
)
from polydraft.options.option import Range, count, option
from polydraft.options.sampling_options import SAMPLING
from polydraft.options.value_checks import folder_to_write, model_name, to_write, to_write_beside

SERVER = "Servers"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One call of `polydraft demo`."""

    max_new_tokens: int = count(96, "Tokens per prompt.", least=8)
    repeats: int = count(2, "How often every prompt is run with and without drafts.")
    svg: Path | None = option(
        None, "Also write the drawn token tree to this SVG file.", metavar="FILE", check=to_write_beside
    )
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions:
    """One call of `polydraft conformance`."""

    rule: str | None = option(
        None,
        "Only the rule of this word, or rules whose name contains it; or FILE.py:CLASS, a rule of your own.",
        flag="--rule --verifier",
        metavar="TEXT",
    )
    drafter: str | None = DRAFTER.but(
        help="Test by sampling whether texts with this drafter follow the law of the model; also FILE.py:CLASS.",
        panel=None,
        metavar="WORD",
    ).usually(None)
    quick: bool = option(False, "Fewer rows, at most two drafts; fewer texts.")
    all_pairs: bool = option(False, "Also try rules on drafts that they are not made for.")
    url: str | None = option(None, "Test the server at this address (docs/conformance_http.md).", SERVER, metavar="URL")
    model: str | None = option(None, "The model's name there; the only one if left out.", SERVER, metavar="NAME")
    engine: str | None = option(
        None,
        "polydraft, vllm, sglang, llama.cpp, ollama, transformers or openai. Default: as /v1/models says.",
        SERVER,
        metavar="NAME",
    )
    tiny: str | None = option(
        None,
        "The server has the model that --export wrote to this folder: test the whole law of its first tokens.",
        SERVER,
        metavar="FOLDER",
        check=model_name,
    )
    copy: str | None = option(
        None,
        "The server has the model in this folder: test its texts against it.",
        SERVER,
        metavar="MODEL",
        check=model_name,
    )
    draft: str | None = option(
        None,
        "The draft model that the server uses: test for texts that lean towards it.",
        SERVER,
        metavar="MODEL",
        check=model_name,
    )
    trust_logprobs: bool = option(
        False, "Test the texts against the log-probabilities that the server tells, without a copy.", SERVER
    )
    chat: bool = option(
        False, "Ask in chats: every prompt is what a user says, by the template of server and copy.", SERVER
    )
    export: Path | None = option(
        None, "Write a tiny model that engines load to a new folder.", SERVER, metavar="FOLDER", check=folder_to_write
    )
    temperature: float | None = option(None, "Of the texts. Default: 1.", SERVER, range=Range(above=0, most=100))
    top_p: float | None = option(None, "Nucleus mass in (0, 1].", SERVER, range=Range(above=0, most=1))
    top_k: int | None = option(None, "Most likely tokens to keep; 0 keeps all.", SERVER, range=Range(0))
    false_alarm: float | None = option(
        None, "How likely a right server may be called wrong. Default: 0.001.", SERVER, range=Range(above=0, most=0.5)
    )
    tolerance: float | None = option(
        None,
        "With --copy and --trust-logprobs: total variation a token that other kernels may make. Default: 0.002.",
        SERVER,
        range=Range(0, 0.4),
    )
    most_tokens: int | None = count(
        None, "Tokens that are tested at most. Default: 30000; with --tiny 180000.", SERVER, least=64
    )
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class FamilyOptions:
    """One call of `polydraft models`."""

    types: tuple[str, ...] = option((), "Types, as `model_type` in config.json; all if none.", argument=True)
    check: bool = option(False, "Try them with the transformers that is installed; all take ten minutes.")
    page: bool = option(False, "Print the table of docs/models.md.")
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ModelOptions):
    """One call of `polydraft tune`."""

    temperatures: tuple[float, ...] = option(
        (0.0, 1.0), "One tree for each; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.usually(8)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    max_tokens: int = count(64, "Tokens generated per prompt and temperature.", MEASURING, least=2)
    check: bool = option(False, "Also measure the chosen trees' speed-up.", MEASURING)
    seed: int = SEED.usually(0)
    max_nodes: int = option(32, "Largest tree, the root included.", DRAFTING, least=2, most=4096)
    max_depth: int = option(8, "Most drafts on a path.", DRAFTING, least=1, most=4096)
    out: Path = option(Path("plan.json"), "The plan file to write.", OUTPUT, metavar="FILE", check=to_write)
    as_json: bool = JSON.usually(False)

    @property
    def names(self) -> tuple[str, str]:
        """What the models are called in the plan."""
        return self.target or "embedded pair's target", self.draft or "embedded pair's draft"


@dataclass(frozen=True, kw_only=True)
class TuneSkipsOptions:
    """One call of `polydraft tune skips`."""

    target: str | None = TARGET.usually(None)
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.usually(8)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    study: Path = option(
        Path("skips.db"),
        "SQLite file that keeps every set measured; a search that was interrupted goes on from it.",
        OUTPUT,
        metavar="FILE",
        check=to_write_beside,
    )
    trials: int = count(300, "Sets that the sampler proposes, those in the study counted.", MEASURING)
    sampler: str = option("tpe", "Who proposes sets: tpe or gp.", MEASURING, metavar="NAME", words=("tpe", "gp"))
    max_tokens: int = count(32, "Tokens that the target writes behind each prompt.", MEASURING, least=2)
    temperature: float = option(1.0, "Of the target and its drafts; 0 is greedy.", SAMPLING)
    seed: int = SEED.usually(0)
    out: Path = option(
        Path("skips.json"), "File to write, for self:skip=FILE.", OUTPUT, metavar="FILE", check=to_write_beside
    )
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ClusterOptions, ModelOptions):
    """One call of `polydraft bench`; what is empty or None is as `SpeedSettings` has it, and no arms are the usual."""

    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.usually(8)
    excerpt_tokens: int | None = EXCERPT.usually(None)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    arms: tuple[str, ...] = option(
        (),
        'What to measure; may be repeated: plain, default, prediction, hf, hf-lookup, "hf-assisted tokens=5 '
        'threshold=0", "tree=3,2,1 verifier=naive", "drafter=ngram tree=chain:8", "name=mine verifier=optimal '
        'bottom-up", "draft=HEAD", "verifier=FILE.py:CLASS drafter=FILE.py:CLASS". '
        "Default: the first three and both others of Hugging Face's.",
        DRAFTING,
        flag="--arm",
        metavar="ARM",
    )
    temperatures: tuple[float, ...] = option(
        (), "0 is greedy; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    batch_sizes: tuple[int, ...] = count(
        (), "Prompts continued together; may be repeated. Default: 1.", MEASURING, flag="--batch-size"
    )
    repeats: int = count(1, "How often every batch is measured.", MEASURING)
    max_new_tokens: int | None = count(
        None,
        "Tokens per prompt, for all arms; fewer only with --until-end and --replay. Default: 64; with --replay "
        "the whole text.",
        MEASURING,
    )
    until_end: bool = option(
        False, "Let the model end a text before it has all its tokens, as users see it.", MEASURING
    )
    replay: bool = option(
        False,
        "Let every arm write the text that a row has as edited or reference, whatever the target would write.",
        MEASURING,
    )
    seed: int = SEED.usually(0)
    out: Path | None = option(
        None,
        "File for one JSON line per run; an interrupted benchmark goes on from it.",
        OUTPUT,
        metavar="FILE",
        check=to_write,
    )
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchHeadsOptions:
    """One call of `polydraft bench heads`; what is empty or None is as `SpeedSettings` has it, and no kinds are all."""

    target: str | None = TARGET.usually(None)
    device: str = DEVICE.usually("auto")
    kinds: tuple[str, ...] = option(
        (),
        "Kind of head; may be repeated. Default: all that `polydraft train head` knows.",
        flag="--head",
        metavar="KIND",
    )
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.but(help="Prompts of each task that are measured; heads learn behind the others.").usually(8)
    learn: tuple[str, ...] = PROMPT_FILES.but(
        help="Prompts behind which heads learn instead, which must not be among the measured ones.", flag="--learn"
    ).usually(())
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    tokens: int = count(120_000, "Tokens of text that the target writes.", MEASURING)
    steps: int = count(200, "Optimiser steps of 8 texts, for every head.", MEASURING)
    seconds: int | None = count(
        None, "Let every head learn for about so many seconds instead, by the time of its first steps.", MEASURING
    )
    rows: int | None = count(None, "Draft only so many tokens, where a head's folder can say so.", MEASURING)
    temperatures: tuple[float, ...] = option(
        (), "0 is greedy; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    max_new_tokens: int | None = count(None, "Tokens per prompt, for all arms. Default: 64.", MEASURING)
    work: Path = FOLDER.but(help="The target's text, checkpoints and heads; an interrupted run goes on.").usually(
        Path("head-work")
    )
    out: Path = option(
        Path("heads.jsonl"),
        "File for one JSON line per run; table.md beside it shows all such files of its folder.",
        OUTPUT,
        metavar="FILE",
        check=to_write,
    )
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """One call of `polydraft report`."""

    runs: Path = FILE_TO_READ.but(help='What "polydraft bench --out" wrote.', argument=True, metavar=None).needed()
    out: Path = FOLDER.but(help="Folder for the page and its figures.").usually(Path("report"))
