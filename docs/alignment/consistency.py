"""Tune the embedded target by CLLM, and drafts for it, and write docs/exits.md's table of what became of them.

    python docs/alignment/consistency.py --work FOLDER      # train what is not there, measure, write the table
    python docs/alignment/consistency.py                    # the table alone

Arms: CLLM as published (it learns the target's own greedy text), the same kept to the target's law, and the embedded
draft tuned to mend blocks. All learn from the same trajectories of Python's source. Each arm's texts are timed beside
plain decoding of the same model in one run, arm after arm for each prompt. The record is
docs/alignment/consistency.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import polydraft
from polydraft.bench.environment import machine
from polydraft.drafters import JacobiBlockDrafter
from polydraft.models import HuggingFaceModel, load_pair
from polydraft.probs import Noise
from polydraft.training import (
    ConsistencyPlan,
    ConsistencySettings,
    HeadRecipe,
    WritingPlan,
    make_consistent,
    measure_quality,
)
from polydraft.training.corpus import standard_library

DOCS = Path(__file__).parents[1]
RECORD, PAGE = DOCS / "alignment" / "consistency.jsonl", DOCS / "exits.md"
MARKS = "<!-- table: consistency -->\n", "<!-- end of consistency -->"
GIVEN, HELD, NEW, BLOCK = 32, 12, 64, 16
MADE = {"CLLM": "tokens", "kept to the law": "law", "draft": "law"}
Line = dict[str, Any]


def beginnings(tokenizer: Any) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Return the beginnings of files to learn from, those of other files to write behind, and these files' texts."""
    files = [one.text for one in standard_library()][::3]
    held, learnt = files[::40][:HELD], [one for number, one in enumerate(files) if number % 40]
    encoded = [
        [tokenizer(one, return_tensors="pt", verbose=False)["input_ids"][0][:GIVEN] for one in some]
        for some in (learnt, held)
    ]
    return [one for one in encoded[0] if len(one) == GIVEN], encoded[1], held


def made(pair: Any, work: Path, prompts: list[Tensor], steps: int, tokens: int) -> Iterator[tuple[str, Any, Line]]:
    """Yield each arm's name, its model, and what training said of it."""
    for name, keep in MADE.items():
        out, start = work / name.replace(" ", "-"), pair.draft if name == "draft" else None
        plan = ConsistencyPlan(
            ConsistencySettings(BLOCK, keep),
            WritingPlan(tokens=tokens, length=128),
            HeadRecipe(steps=steps, texts=4, matrix_rate=1e-3, other_rate=5e-4, measure_every=10**9, save_every=50),
            "the embedded target",
        )
        if not (out / "made.json").is_file():
            found = make_consistent(pair.target, prompts, work, out, plan, start=start)
            (out / "made.json").write_text(json.dumps(found.as_dict()))
        yield name, type(pair.target).from_pretrained(out).eval(), json.loads((out / "made.json").read_text())


def speeds(models: dict[str, Any], pair: Any, prompts: list[Tensor]) -> Iterator[Line]:
    """Yield, for each arm and temperature, the speed beside plain decoding of the same target, and tokens per call."""
    chain, target = polydraft.Chain(8), pair.target
    copied, draft = (HuggingFaceModel(models[name]) for name in ("CLLM", "draft"))
    arms: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "the target, `jacobi`": (target, "jacobi", {"policy": chain}),
        "CLLM, `jacobi`": (models["CLLM"], "jacobi", {"policy": chain}),
        "kept to the law, `jacobi`": (models["kept to the law"], "jacobi", {"policy": chain}),
        "the target, CLLM drafts": (target, JacobiBlockDrafter(copied, BLOCK), {"policy": chain}),
        "the target, the tuned draft mends once": (target, JacobiBlockDrafter(draft, BLOCK), {"policy": chain}),
        "the target, the tuned draft mends twice": (target, JacobiBlockDrafter(draft, BLOCK, 2), {"policy": chain}),
        "the target, the embedded draft": (target, pair.draft, {}),
    }
    for heat in (0.0, 1.0):
        settings: dict[str, Any] = {"temperature": heat, "max_new_tokens": NEW, "seed": 1, "eos_token_id": None}
        ratios, calls = ({name: list[float]() for name in arms} for _ in range(2))
        for prompt in prompts:
            for name, (model, drafter, chosen) in arms.items():
                plain = polydraft.generate(model, prompt[None], drafter="none", **settings).statistics
                own = polydraft.generate(model, prompt[None], drafter=drafter, **settings, **chosen).statistics
                ratios[name].append(plain.seconds["total"] / own.seconds["total"])
                calls[name].append(own.new_tokens / own.target_calls)
        for name in arms:
            low, high = interval(ratios[name])
            yield {
                "arm": name,
                "heat": heat,
                "calls": mean(calls[name]),
                "ratio": mean(ratios[name]),
                "within": [low, high],
            }


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % interval of the mean, by resampling prompts."""
    (random,) = Noise.from_seed(1, 1).generators
    drawn = torch.tensor(values)[torch.randint(len(values), (2000, len(values)), generator=random)].mean(-1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def table() -> str:
    """Return the tables of the record."""
    line = json.loads(RECORD.read_text())
    rows = [
        "| | passes for a block | fast-forwarded | stationary | KL a token | bits a byte |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in line["models"].items():
        drift = "" if one["divergence"] is None else f"{one['divergence']:.3f}"
        bits = "" if one["bits"] is None else f"{one['bits']:.3f}"
        counts = (f"{one[count]:.2f}" for count in ("passes", "fast_forwarded", "stationary"))
        rows.append(f"| {name} | {' | '.join(counts)} | {drift} | {bits} |")
    rows += [
        "",
        "| who writes, who drafts | tokens per call, T = 0 | speed | tokens per call, T = 1 | speed |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one["arm"] for one in line["speeds"]):
        cold, warm = (
            next(one for one in line["speeds"] if one["arm"] == name and one["heat"] == heat) for heat in (0.0, 1.0)
        )
        told = [
            f"{one['calls']:.2f} | {one['ratio']:.2f}x [{one['within'][0]:.2f}, {one['within'][1]:.2f}]"
            for one in (cold, warm)
        ]
        rows.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Train, measure, and write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where text, trajectories and models are; without it nothing is run")
    parser.add_argument("--steps", type=int, default=300, help="of an arm, of four texts each")
    parser.add_argument("--tokens", type=int, default=49_152, help="of the target's text, in texts of 128")
    given = parser.parse_args()
    if given.work is not None:
        pair = load_pair()
        learnt, held, texts = beginnings(pair.tokenizer)
        models, told = dict[str, Any](), dict[str, Line]()
        for name, model, one in made(pair, given.work, learnt, given.steps, given.tokens):
            if name == "CLLM":
                quality = measure_quality(pair.target, pair.draft, pair.tokenizer, texts)
                told["the target"] = {**one["before"], "divergence": 0.0, "bits": quality.target_bits_per_byte}
            if name == "draft":
                told["the embedded draft"] = {**one["before"], "divergence": None, "bits": quality.draft_bits_per_byte}
            own = measure_quality(model, pair.draft, pair.tokenizer, texts).target_bits_per_byte
            drift = None if one["drift"] is None else one["drift"]["divergence"]
            shown = "the tuned draft" if name == "draft" else name
            models[name], told[shown] = model, {**one["after"], "divergence": drift, "bits": own, "made": one}
            sys.stdout.write(f"{shown}: {told[shown]}\n")
            sys.stdout.flush()
        line = {
            "machine": machine(torch.device("cpu")),
            "models": told,
            "speeds": [*speeds(models, pair, held)],
            "asked": [given.steps, given.tokens],
        }
        RECORD.write_text(json.dumps(line, default=str) + "\n")
    if not RECORD.exists():
        raise SystemExit("There is no record yet: name a folder by --work.")
    text = PAGE.read_text(encoding="utf-8")
    if all(mark in text for mark in MARKS):
        before, rest = text.split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()
