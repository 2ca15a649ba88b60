"""Let the last stage of `align` judge drafts whose worth is known, by the clock, and count right verdicts.

    python docs/alignment/verdicts.py --runs 20 --seconds 18

Of the embedded pair: the shipped draft is judged beside itself (no better), beside a copy with noise in its weights
(better), and that copy beside the shipped one (no better). Prompts are HumanEval's, other ones in each run. A line of
docs/alignment/verdicts.jsonl is a run; what is there is not run again.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from polydraft.bench import read_prompt_sets
from polydraft.bench.aligning.align_stages import usual_arm
from polydraft.bench.aligning.judging import AFTER, compare, judge, verdict_of
from polydraft.bench.environment import machine
from polydraft.bench.speed import SpeedResults, SpeedSettings, plain_arm, prompts_that_fit, speed_conditions
from polydraft.models import Pair, load_pair

RECORD = Path(__file__).with_suffix(".jsonl")
BEFORE, PROMPTS, TOKENS, REPEATS = "given draft", 16, 48, 50
CASES = {"the same draft": (0.0, 0.0), "a worse draft": (0.0, 1.0), "a better draft": (1.0, 0.0)}
"""How much noise the given draft and the new one have, in shares of `--noise`."""


def noisy(draft: Any, share: float) -> Any:
    """Return a copy of a draft with normal noise in its matrices, of so large a share of their spread."""
    made = copy.deepcopy(draft)
    random = torch.Generator().manual_seed(1)
    for weight in made.parameters():
        if weight.dim() == 2:
            weight.data.add_(share * weight.std() * torch.randn(weight.shape, generator=random))
    return made


def verdict(pair: Pair, case: str, number: int, noise: float, seconds: float, seed: int) -> dict[str, Any]:
    """Judge one case, as the last stage of `align` does."""
    drafts = [noisy(pair.draft, share * noise) for share in CASES[case]]
    arms = [
        plain_arm(pair.target, {}),
        *(usual_arm(name, pair.target, one, {}) for name, one in zip((BEFORE, AFTER), drafts, strict=True)),
    ]
    settings = SpeedSettings(temperatures=(0.0, 1.0), repeats=REPEATS, max_new_tokens=TOKENS, seed=seed)
    every = read_prompt_sets(("humaneval",), None, chat_template=False)
    asked = [every[place % len(every)] for place in range(seed * PROMPTS, (seed + 1) * PROMPTS)]
    alone = Pair(pair.target, None, pair.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        conditions = speed_conditions(alone, arms, settings, ("pair", None))
        results, end = SpeedResults(conditions, Path(folder) / "speed.jsonl"), perf_counter() + seconds
        prompts = prompts_that_fit(alone, asked, settings)
        compare(alone, arms, prompts, settings, results, lambda: max(0.0, end - perf_counter()))
        found = verdict_of(judge(results.records, seed))
    right = found.better == (case == "a better draft")
    return {"run": number, "case": case, "said": found.word, "right": right, "reason": found.reason, "noise": noise}


def main() -> None:
    """Run what is missing, and tell how many verdicts were right."""
    parser = argparse.ArgumentParser(description="Count right verdicts of the last stage of align.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=18.0, help="of a run")
    parser.add_argument("--noise", type=float, default=0.2, help="of the worse draft, as a share of weights' spread")
    asked = parser.parse_args()
    lines = [json.loads(one) for one in RECORD.read_text().splitlines()] if RECORD.is_file() else []
    pair, known = load_pair(), {one["run"] for one in lines}
    for number in (one for one in range(asked.runs) if one not in known):
        case = [*CASES][number % len(CASES)]
        found = verdict(pair, case, number, asked.noise, asked.seconds, number)
        found |= {"seconds": asked.seconds, "machine": machine(pair.target.device)}
        lines.append(found)
        with RECORD.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number}: {case}: {found['said']}; {found['reason']}", flush=True)
    print(f"{sum(one['right'] for one in lines)} of {len(lines)} verdicts are right.")


if __name__ == "__main__":
    main()
