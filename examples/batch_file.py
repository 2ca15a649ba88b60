"""Continue every prompt of a file, and write a line of JSON as each text ends.

    python examples/batch_file.py prompts.jsonl texts.jsonl

A line of the input is a JSON object with `id` and `prompt`. `polydraft generate --input` does the same, and goes on
where it was interrupted.
"""

import argparse
import json
from pathlib import Path

import polydraft


def main() -> None:
    """Write the texts, several in progress at a time; each is the one that its prompt and seed have alone."""
    parser = argparse.ArgumentParser(description="Continue every prompt of a file.")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()

    rows = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    pair = polydraft.load_pair()
    prompts = {row["id"]: pair.tokenizer(row["prompt"], return_tensors="pt")["input_ids"][0] for row in rows}
    run = polydraft.generate_many(
        pair.target,
        prompts,
        drafter=pair.draft,
        batch_size=8,
        temperature=0.8,
        top_k=0,
        max_new_tokens=given.max_new_tokens,
        seed=1,
    )
    with given.texts.open("w", encoding="utf-8") as file:
        for text in run:  # in the order in which they end
            row = {"id": text.name, "text": pair.tokenizer.decode(text.tokens, skip_special_tokens=True)}
            row |= {"finish": text.finish, "seed": text.seed}
            file.write(json.dumps(row) + "\n")
    print(f"{len(prompts)} texts are in {given.texts}, {run.statistics.tokens_per_second:.0f} tokens per second")


if __name__ == "__main__":
    main()
