"""`polydraft train pair`: the embedded pair from nothing."""

from pathlib import Path

from rich.console import Console

from polydraft.training import PairRecipe, export_pair, train_pair


def run_train_pair(work: Path, out: Path) -> None:
    """Train, export and report; an interrupted run goes on where it stopped."""
    console = Console(stderr=True, highlight=False)
    recipe = PairRecipe()
    try:
        target, draft = train_pair(work, recipe)
    except KeyboardInterrupt:
        console.print(f"Interrupted; the same command goes on from the last checkpoint in {work}.")
        raise SystemExit(130) from None
    quality = export_pair(work, target, draft, out, recipe)
    console.print(
        f"Written to {out}. On {quality.tokens} held-out tokens: target {quality.target_bits_per_byte:.3f} bits per "
        f"byte, draft {quality.draft_bits_per_byte:.3f}, overlap {quality.overlap:.3f}."
    )
