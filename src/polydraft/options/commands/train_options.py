"""Options of `polydraft train pair` and `polydraft train head`."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.options.commands.option_groups import (
    CHAT_TEMPLATE,
    FOLDER,
    JSON,
    LIMIT,
    OUTPUT,
    PROMPT_FILES,
    SEED,
    TARGET,
)
from polydraft.options.option import Option, count, option

TEXT, TRAINING = "Text", "Training"


@dataclass(frozen=True, kw_only=True)
class TrainPairOptions:
    """One call of `polydraft train pair`."""

    out: Path = FOLDER.but(help="Where the two model folders are written.").needed()
    work: Path = FOLDER.but(help="Corpus, checkpoints; an interrupted run goes on from here.").needed()


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions:
    """One call of `polydraft train head`."""

    kind: str = Option(
        "medusa, mlp, eagle, eagle-3, dspark, or mixing (rows know the drafted path).", argument=True, metavar="KIND"
    ).needed()
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.but(help="Prompts per task.").usually(100_000)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    out: Path = FOLDER.but(help="The head's folder.", panel=OUTPUT).usually(Path("head"))
    work: Path = FOLDER.but(
        help="The target's text and checkpoints; an interrupted run goes on from here.", panel=OUTPUT
    ).usually(Path("head-work"))
    form: str = option(
        "official", "Form of the folder: official, or speculators (medusa: vllm; dspark: deepspec too).", OUTPUT
    )
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
    loss: str = option(
        "published",
        "published (by the head's authors), entropy, acceptance, lk-alpha, lk-lambda, or of block heads d-pace.",
        TRAINING,
    )
    layers: int | None = count(None, "Layers. Default: those of --start, or 1, of block heads 2.", TRAINING)
    drafts: int | None = count(None, "Tokens deep that it learns to draft. Default: those of --start, or 6.", TRAINING)
    term: str | None = option(
        None,
        "Of dspark: its rows know the last token (vanilla, gated), or the whole drafted path (rnn). "
        "Default: that of --start, or vanilla.",
        TRAINING,
    )
    rank: int | None = count(None, "Of dspark: rank of its term. Default: that of --start, or 64.", TRAINING)
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
        "Of eagle-3: keep the target's output rows instead of learning own ones; steps are cheaper.",
        TRAINING,
    )
    seed: int = SEED.usually(1)
