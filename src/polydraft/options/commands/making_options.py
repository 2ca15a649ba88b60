"""Options of the commands that bring or make files: `polydraft fetch`, `store build`, `store show` and `train`."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.options.commands.option_groups import (
    CHAT_TEMPLATE,
    FILE_TO_READ,
    FOLDER,
    JSON,
    LIMIT,
    OUTPUT,
    PROMPT_FILES,
    SEED,
    TARGET,
)
from polydraft.options.option import LARGEST_COUNT, Option, count, option
from polydraft.options.value_checks import to_look_at


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """One call of `polydraft fetch`."""

    what: str | None = option(
        None, "What to fetch; none lists all there is.", argument=True, metavar="WORD", words="fetched"
    )
    source: Path | None = FILE_TO_READ.but(
        help="The file that would be downloaded, if you have it.", flag="--from"
    ).usually(None)
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class StoreBuildOptions:
    """One call of `polydraft store build`."""

    files: tuple[Path, ...] = Option(
        "Plain text, JSON lines, or folders of both, looked through to the end.", argument=True, metavar="FILES"
    ).needed()
    out: Path = FOLDER.but(help="The store's folder.", panel=OUTPUT).needed()
    kind: str = option(
        "suffix",
        "suffix: add to a store that grows with use; rest: a store that is only read.",
        OUTPUT,
        metavar="NAME",
        words=("suffix", "rest"),
    )
    target: str | None = TARGET.usually(None)
    most_mb: int | None = count(
        None,
        "The largest size. suffix drops its oldest texts (default: its own, 268 if new), rest takes no more.",
        OUTPUT,
    )
    as_json: bool = JSON.usually(False)

    @property
    def most_bytes(self) -> int | None:
        """The store's largest size, if it was given."""
        return None if self.most_mb is None else 1_000_000 * self.most_mb


@dataclass(frozen=True, kw_only=True)
class StoreShowOptions:
    """One call of `polydraft store show`."""

    folder: Path = Option(
        "The store's folder, or one of its files.", argument=True, metavar="FOLDER", check=to_look_at
    ).needed()
    as_json: bool = JSON.usually(False)


LEARNT = Option("The folder that `polydraft serve --learn` names.", argument=True, metavar="FOLDER", check=to_look_at)


@dataclass(frozen=True, kw_only=True)
class LearnShowOptions:
    """One call of `polydraft learn show`."""

    folder: Path = LEARNT.needed()
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class LearnForgetOptions:
    """One call of `polydraft learn forget`."""

    folder: Path = LEARNT.needed()
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class LearnPinOptions:
    """One call of `polydraft learn pin`."""

    folder: Path = LEARNT.needed()
    version: str = Option(
        "A version, its number, 0 for the weights before all learning, or newest to learn on.",
        argument=True,
        metavar="VERSION",
    ).needed()
    as_json: bool = JSON.usually(False)


TEXT, TRAINING = "Text", "Training"


@dataclass(frozen=True, kw_only=True)
class TrainPairOptions:
    """One call of `polydraft train pair`."""

    out: Path = FOLDER.but(help="Where the two model folders are written.").needed()
    work: Path = FOLDER.but(help="Corpus, checkpoints; an interrupted run goes on from here.").needed()


WORK = FOLDER.but(help="The target's text and checkpoints; an interrupted run goes on from here.", panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """What is learnt from: text that the target writes behind prompts; and how long."""

    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.but(help="Prompts per task.").usually(100_000)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    out: Path = FOLDER.but(help="What is made.", panel=OUTPUT).usually(Path("made"))
    work: Path = WORK.usually(Path("work"))
    as_json: bool = JSON.usually(False)
    target: str | None = TARGET.usually(None)
    tokens: int = count(500_000, "Tokens of text that the target writes.", TEXT)
    length: int = count(384, "Tokens of each text, of which its prompt is three quarters at most.", TEXT, least=16)
    past_end: bool = option(False, "Also learn what the target writes behind an end token.", TEXT)
    steps: int = count(2000, "Optimiser steps of 8 texts.", TRAINING)
    rate: float = option(
        0.004,
        "Peak learning rate of weight matrices (Muon); tables, norms and biases (AdamW) have half of it.",
        TRAINING,
    )
    seed: int = SEED.usually(1)


LOSS = Option(
    "published (by the head's authors), entropy, acceptance, lk-alpha, lk-lambda, or of block heads d-pace.", TRAINING
)
EXIT = Option(
    "Of an adapter: behind how many of the target's layers it stands. Default: that of --start, or 2.",
    TRAINING,
    least=1,
    largest=LARGEST_COUNT,
)


@dataclass(frozen=True, kw_only=True)
class HeadWord:
    """The kind of head, which stands first on the command line."""

    kind: str = Option(
        "medusa, medusa-2, mlp, arctic-rnn, arctic-lstm, redrafter, hydra, hydra++, joined-walk, pass, space, eagle, "
        "hass, eagle-3, p-eagle, falcon, mtp, dspark, xpress, lilicorr, mixing, spire, adapter, pard, "
        "pard-path, spec-drafter.",
        argument=True,
        metavar="KIND",
    ).needed()


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions(LearningOptions, HeadWord):
    """One call of `polydraft train head`."""

    out: Path = FOLDER.but(help="The head's folder.", panel=OUTPUT).usually(Path("head"))
    work: Path = WORK.usually(Path("head-work"))
    form: str | None = option(
        None,
        "Form of the folder: official, or speculators (medusa: vllm; dspark: deepspec too; hydra, mlp and others that "
        "walk: polydraft). Default: official, or with --rows the first that has so few.",
        OUTPUT,
    )
    loss: str = LOSS.usually("published")
    layers: int | None = count(None, "Layers. Default: those of --start, or 1, of block heads 2.", TRAINING)
    drafts: int | None = count(None, "Tokens deep that it learns to draft. Default: those of --start, or 6.", TRAINING)
    term: str | None = option(
        None,
        "Of dspark: its rows know the last token (vanilla, gated), or the whole drafted path (rnn). "
        "Default: that of --start, or vanilla.",
        TRAINING,
    )
    rank: int | None = count(
        None, "Of dspark, xpress, pard-path: rank of its term. Default: that of --start, or 64.", TRAINING
    )
    exit: int | None = EXIT.usually(None)
    rows: int | None = count(
        None, "Draft only so many of the target's tokens, the most written ones. Default: all.", TRAINING
    )
    start: Path | None = option(
        None,
        "Begin with the weights of this head, of the same kind; of a block head with another term, its layers. "
        "Default: new ones.",
        TRAINING,
        metavar="FOLDER",
    )
    frozen_rows: bool = option(
        False,
        "Of eagle-3 and p-eagle: keep the target's output rows instead of learning own ones; steps are cheaper.",
        TRAINING,
    )


@dataclass(frozen=True, kw_only=True)
class TrainAdapterOptions(LearningOptions):
    """One call of `polydraft train adapter`."""

    exit: int | None = EXIT.usually(None)
    out: Path = FOLDER.but(help="The adapter's folder.", panel=OUTPUT).usually(Path("adapter"))
    work: Path = WORK.usually(Path("adapter-work"))
    loss: str = LOSS.but(help="published (soft cross entropy), entropy, acceptance, lk-alpha or lk-lambda.").usually(
        "published"
    )
    start: Path | None = option(
        None, "Begin with the weights of this adapter. Default: new ones.", TRAINING, metavar="FOLDER"
    )


@dataclass(frozen=True, kw_only=True)
class TrainExitsOptions(LearningOptions):
    """One call of `polydraft train exits`."""

    out: Path = FOLDER.but(help="The tuned model's folder.", panel=OUTPUT).usually(Path("exits"))
    work: Path = WORK.usually(Path("exits-work"))
    rate: float = option(
        0.001, "Peak learning rate of weight matrices (Muon); norms have half of it, tables an eighth.", TRAINING
    )
    dropout: float = option(
        0.2, "How often the last layer is left out while it learns; earlier ones are left out less often.", TRAINING
    )
    scale: str = option(
        "sum", "How much later exits count more: sum, linear or sqrt of the layers up to them.", TRAINING
    )
    early: float = option(1.0, "By what exits before the last are multiplied.", TRAINING)
    curriculum: str = option(
        "rotational",
        "Which exits learn: rotational (every R-th, moved on with each step), gradual (from the last down, all by "
        "half of the steps) or none (every R-th).",
        TRAINING,
    )
    every: int | None = count(None, "R of the curriculum. Default: 4 if rotational, else 1.", TRAINING)


@dataclass(frozen=True, kw_only=True)
class TrainConsistencyOptions(LearningOptions):
    """One call of `polydraft train consistency`."""

    out: Path = FOLDER.but(help="The tuned model's folder.", panel=OUTPUT).usually(Path("consistent"))
    work: Path = WORK.usually(Path("consistency-work"))
    rate: float = option(
        0.001, "Peak learning rate of weight matrices (Muon); tables, norms and biases (AdamW) have half.", TRAINING
    )
    block: int = count(16, "Tokens of a block.", TRAINING, least=2)
    keep: str | None = option(
        None,
        "What is kept to on the text: tokens (CLLM: those that the target wrote) or law (the target's rows). "
        "Default: tokens, of --start law.",
        TRAINING,
        words=("tokens", "law"),
    )
    weight: float = option(10.0, "What the text counts beside the consistency.", TRAINING, least=0.0)
    start: str | None = option(
        None, "Tune this draft for the target, and not the target itself.", TRAINING, metavar="FOLDER"
    )
