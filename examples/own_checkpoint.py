"""Continue a prompt with models of your own: folders, GGUF files or names on the hub.

    python examples/own_checkpoint.py --target FOLDER --draft FOLDER --prompt "Once upon a time"

Without options it is the pair that ships with the package. Without a draft model drafts come from the text itself.
"""

import argparse

import polydraft


def main() -> None:
    """Write a text with drafts, and tell what they brought."""
    parser = argparse.ArgumentParser(description="Continue a prompt with a checkpoint of your own.")
    parser.add_argument("--target", default="pair")
    parser.add_argument("--draft", help="a draft model or draft head with the target's tokens")
    parser.add_argument("--prompt", default="def read_json(path):\n    with open(")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()

    pair = polydraft.load(given.target, given.draft)
    prompt = pair.tokenizer(given.prompt, return_tensors="pt")["input_ids"]
    output = polydraft.generate(
        pair.target, prompt, drafter=pair.draft, tokenizer=pair.tokenizer, max_new_tokens=given.max_new_tokens
    )
    print(pair.tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    print(f"{output.statistics.new_tokens} tokens in {output.statistics.target_calls} passes of the target")


if __name__ == "__main__":
    main()
