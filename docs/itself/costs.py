"""Time what views cost on a random Llama of about a billion weights: costs only, since nothing is accepted for a reason.

    python docs/itself/costs.py --key-heads 8 --known 4096

Prints, in passes of the target over one token, a level of each view's drafts and the pass that verifies four of them:
means of a text of 12 tokens with a chain of 4, behind tokens that were read once.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polydraft

FEW = "self:int8,keys=snap:512"
VIEWS = ("self:int8", "self:keys=recent:16+240", "self:int8,keys=recent:16+240", FEW)
TOKENS, NEW = 32_000, 12


def random_model(key_heads: int) -> LlamaForCausalLM:
    """Return 16 layers of width 2,048 with 32 heads and so many heads of keys."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
    config = LlamaConfig(vocab_size=TOKENS, num_key_value_heads=key_heads, max_position_embeddings=8192, **sizes)
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Print a line for each view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--known", type=int, default=4096)
    given = parser.parse_args()
    torch.manual_seed(1)
    model, prompt = random_model(given.key_heads), torch.randint(0, TOKENS, (1, given.known))
    common: dict[str, Any] = {"temperature": 1.0, "eos_token_id": TOKENS, "seed": 1}
    read = polydraft.generate(model, prompt, **common, drafter=FEW, policy=4, max_new_tokens=1, keep_past=True)
    common |= {"past": read.past, "max_new_tokens": NEW}
    plain = 0.0
    for view in ("none", *VIEWS):
        found = polydraft.stream(model, prompt, **common, drafter=view, policy=None if view == "none" else 4)
        told = found.exhaust().statistics
        target = told.seconds["target"] / told.steps
        plain = plain or target
        level = told.seconds["draft"] / max(1, told.drafted) / plain
        print(f"{view}: a level {level:.2f}, the target's pass {target / plain:.2f} of {1000 * plain:.0f} ms")


if __name__ == "__main__":
    main()
