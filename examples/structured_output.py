"""Let a text be a JSON value of a schema: drafted and sampled as ever, every token within the schema.

pip install "llguidance>=1.3,<2"
python examples/structured_output.py
"""

import json

import polydraft
from polydraft import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "folder"]}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


def main() -> None:
    """Sample a value, and read it."""
    pair = polydraft.load_pair()
    prompt = pair.tokenizer("def load(path):\n    return ", return_tensors="pt")["input_ids"]
    output = polydraft.generate(
        pair.target,
        prompt,
        drafter=pair.draft,
        tokenizer=pair.tokenizer,
        grammar=Grammar.json_schema(SCHEMA, compact=True),
        temperature=1.0,
        top_k=0,
        max_new_tokens=64,
        seed=2,
    )
    text = pair.tokenizer.decode(output.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
    print(json.loads(text))


if __name__ == "__main__":
    main()
