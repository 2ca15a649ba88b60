"""Decode with chains of drafts, measure the same texts without decoding, and tell how far the two agree.

    python docs/alignment/agreement.py                    # the embedded pair, and SmolLM2 with its head

Prompts are HumanEval's. Every text is written plainly and with a draft, one right after the other; the texts that the
draft was used for are then read as `polydraft align --measure` reads its own, and tokens per call and speed are
predicted of them. So the two differ by what decoding draws, and not by their texts. A line of
docs/alignment/agreement.jsonl is a pair, a temperature and a length of chain; what is there is not measured again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.aligning.form_costs import cost_of
from polydraft.bench.environment import machine
from polydraft.bench.prompts.prompt import encode
from polydraft.bench.speed.speed_ups import PairedRuns, speed_up
from polydraft.drafters import Drafter, drafter_of
from polydraft.models import HuggingFaceModel, Pair
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_worth import BLOCK, DraftWorth
from polydraft.training.alignment.own_text import OwnTexts, chains_of_text

RECORD = Path(__file__).with_suffix(".jsonl")
PAIRS, LENGTHS, GIVEN = {"pair": "pair-draft", "smollm2": "smollm2-head"}, (2, 4), 64


def agreement(pair: Pair, heat: float, length: int, prompts: int, tokens: int) -> dict[str, Any]:
    """Return tokens per call and speed of one length of chain, decoded and predicted of the same texts."""
    draft = pair.draft if isinstance(pair.draft, Drafter) else drafter_of(pair.draft)
    settings: dict[str, Any] = {"temperature": heat, "max_new_tokens": tokens, "eos_token_id": None}
    settings |= {"top_k": 0} if heat else {}
    every = [encode(pair, one, GIVEN)[0] for one in read_prompt_sets(("humaneval",), prompts, chat_template=False)]
    speeds, texts, calls = list[list[PairedRuns]](), list[torch.Tensor](), list[int]()
    for seed, ids in enumerate(every):
        plain = polydraft.generate(pair.target, ids[None], drafter="none", seed=seed, **settings).statistics
        policy = polydraft.Chain(length)
        found = polydraft.generate(pair.target, ids[None], drafter=draft, policy=policy, seed=seed, **settings)
        own = found.statistics
        sides = [(one.new_tokens, one.seconds["total"]) for one in (own, plain)]
        speeds.append([PairedRuns(*sides[0], *sides[1])])
        texts.append(found.sequences[0])
        calls.append(own.target_calls)
    target, params = HuggingFaceModel(pair.target), SamplingParams(temperature=heat)
    expected = list[float]()
    for ids, text in zip(every, texts, strict=True):
        one = OwnTexts(text[None], torch.tensor([len(ids)]), torch.tensor([len(text) - len(ids)]))
        worth = DraftWorth.of(chains_of_text(target, draft, one, params, length))
        expected.append(float(worth.calls[BLOCK][0, length - 1]))
    written = [len(text) - len(ids) for ids, text in zip(every, texts, strict=True)]
    ratio = speed_up([[PairedRuns(*one)] for one in zip(written, calls, written, expected, strict=True)]).total
    step, clock = cost_of(target, draft, heat).steps[length - 1], speed_up(speeds).total
    return {
        "prompts": len(every),
        "tokens": sum(written),
        "tokens_per_call": {"decoded": sum(written) / sum(calls), "measured": sum(written) / sum(expected)},
        "decoded_over_measured": vars(ratio),
        "speed": {"found": vars(clock), "predicted": sum(written) / sum(expected) / step},
        "machine": machine(pair.target.device),
    }


def main() -> None:
    """Measure what is missing, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    known = [json.loads(one) for one in RECORD.read_text().splitlines()] if RECORD.is_file() else []
    for target, draft in PAIRS.items():
        pair = polydraft.load(target, draft if target == "pair" else None)
        for heat in (0.0, 1.0):
            for length in LENGTHS:
                place = {"target": target, "draft": draft, "temperature": heat, "drafts": length}
                if any(one | place == one for one in known):
                    continue
                line = json.dumps(place | agreement(pair, heat, length, asked.prompts, asked.tokens))
                with RECORD.open("a") as file:
                    file.write(line + "\n")
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
