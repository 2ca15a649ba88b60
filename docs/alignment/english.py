"""Make a pair of English out of books, for `polydraft align` to work on.

    python docs/alignment/english.py BOOK.txt ... --out FOLDER
    polydraft align FOLDER/target --draft FOLDER/draft --prompts FOLDER/prompts.jsonl --minutes 20 --out FOLDER/aligned

The target has twelve layers of width 256 and 4,096 tokens, the draft one layer of width 128. Both learn the books' own
text, and the draft learns nothing of the target, as the small member of a family does. Prompts are pieces of the books
that neither has seen. A call that was interrupted goes on where it was.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

from polydraft.training.corpus import SourceFile
from polydraft.training.pair import PairRecipe, PairShape, Stage, build_model, prepare_text, train_stage

PIECE, PROMPT, PROMPTS = 4000, 400, 96
"""Characters of a piece and of a prompt, which is how a held-out piece begins; and how many are held out."""
RECIPE = PairRecipe(
    vocab_size=4096,
    compiled=False,
    target_shape=PairShape(layers=12, width=256, inner=768, heads=4),
    draft_shape=PairShape(layers=1, width=128, inner=384, heads=2),
    target=Stage(500, 16, 256, matrix_rate=5e-3, other_rate=5e-3, warmup_steps=30, decay_steps=200),
    draft=Stage(500, 16, 256, matrix_rate=5e-3, other_rate=5e-3, warmup_steps=30, decay_steps=200),
)


def pieces(books: list[Path]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the pieces to learn from, and those that are held out, in an order of their own."""
    texts = [book.read_text(encoding="utf-8", errors="replace") for book in books]
    every = [
        SourceFile("books", "public domain", f"{book.name} {place}", text[place : place + PIECE])
        for book, text in zip(books, texts, strict=True)
        for place in range(0, len(text), PIECE)
    ]
    random.Random(RECIPE.seed).shuffle(every)
    return every[PROMPTS:], every[:PROMPTS]


def main() -> None:
    """Train both models, and write them with the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="+", help="files of plain text")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = prepare_text(given.out / "training", RECIPE, lambda: pieces(given.books))
    for name, stage, shape in (
        ("target", RECIPE.target, RECIPE.target_shape),
        ("draft", RECIPE.draft, RECIPE.draft_shape),
    ):
        made = train_stage(
            *(given.out / "training", name, RECIPE, stage),
            lambda shape=shape: build_model(shape, RECIPE, int(tokenizer.eos_token_id)),
        )
        shutil.copytree(made, given.out / name, ignore=shutil.ignore_patterns("*.bin"), dirs_exist_ok=True)
        tokenizer.save_pretrained(str(given.out / name))
    held_out = (given.out / "training" / "held_out.jsonl").read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["text"][:PROMPT]} for line in held_out]
    (given.out / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")


if __name__ == "__main__":
    main()
