"""`polydraft train pair`: the embedded pair from nothing."""

from pathlib import Path

from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import console
from polydraft.cli.process import stopped
from polydraft.errors import ResultsError
from polydraft.extras import TRAIN
from polydraft.options.commands.train_options import TrainPairOptions
from polydraft.training import PairRecipe, export_pair, train_pair

PARTS = ("tokenizer", "train.u32", "held_out.jsonl")
"""What lies beside corpus.json, which is written last."""


def run_train_pair(options: TrainPairOptions) -> int:
    """Train, export and report; return the exit code: 0, or 130 after Ctrl-C, after which the same call goes on.

    Raises:
        InvalidParameter: both folders are the same.
        MissingExtra: accelerate cannot be used.
        ResultsError: the work folder is damaged, or a folder cannot be read or written.
    """
    notes, work, out = console(errors=True), options.work, options.out
    check_training(work, out)
    recipe = PairRecipe()
    try:
        target, draft = train_pair(work, recipe)
        quality = export_pair(work, target, draft, out, recipe)
    except KeyboardInterrupt:
        return stopped(f"the same command goes on from the last checkpoint in {work}")
    except OSError as error:
        raise ResultsError(f"The training cannot go on in {work} and {out}: {error.strerror or error}.") from error
    notes.print(
        f"Written to {out}. On {quality.tokens} held-out tokens: target {quality.target_bits_per_byte:.3f} bits per "
        f"byte, draft {quality.draft_bits_per_byte:.3f}, overlap {quality.overlap:.3f}.",
        soft_wrap=True,
    )
    return 0


def check_training(work: Path, out: Path) -> None:
    """Check what can be checked before hours of work.

    Raises:
        InvalidParameter: both folders are the same.
        MissingExtra: accelerate cannot be used.
        ResultsError: parts of the work folder are missing.
    """
    same = work.resolve() == out.resolve()
    refuse_clashes((same, "--out and --work are the same folder: the models belong into one of their own."))
    TRAIN.check()
    missing = [name for name in PARTS if not (work / name).exists()] if (work / "corpus.json").exists() else []
    if missing:
        raise ResultsError(f"{work}: {missing[0]} is missing beside corpus.json; begin in an empty folder.")
