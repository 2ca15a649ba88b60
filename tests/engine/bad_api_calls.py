"""Bad calls of the public functions, generated from the kinds of their arguments: a program that prints what came.

It runs in a process of its own, without the type checks that tests have: users have none either.
"""

import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import polydraft
from polydraft import EAGLE_25, Chain, ModelDrafter, NaiveMatch, TopDown
from polydraft.errors import PolydraftError
from polydraft.models import Pair
from polydraft.models.tiny import tiny_draft, tiny_target

PATIENCE = 100.0
"""Seconds that a call may take on a busy machine before it counts as hanging."""
NOTHING: list[Any] = [None, True, False, 0, -1, 3, 1.5, float("nan"), float("inf"), 10**400, "", "x", "\x1b[31m", b"x"]
NOTHING += [[], [1.5], ["a"], {}, {"a": 1}, (), object(), int, print, torch.tensor(1.0), torch.zeros(2, 3), 3 + 4j]
NOTHING += [Path("nowhere"), "no/such/folder", {1, 2}, range(3), lambda *_: None]


class Strange:
    """A processor, criterion or drafter that answers nonsense."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, *_: Any) -> Any:
        return self.answer


def pools(target: Any, draft: Any) -> dict[str, list[Any]]:
    """Return values for each argument, right and wrong."""
    pair = Pair(target, draft, None)  # pyright: ignore
    ids = torch.tensor([[1, 2, 3]])
    answers = [None, True, 1, torch.ones(1), torch.zeros(1, 8), torch.full((1, 8), float("nan")), "x", [1.0] * 8]
    return {
        "model": [target, pair, None, "folder", draft.config, torch.nn.Linear(2, 2), target.model],
        "input_ids": [ids, ids[0], ids.float(), ids.bool(), ids[:, :0], ids[:0], ids + 9, ids - 5, {"input_ids": ids},
                      {"input_ids": [1, 2]}, ids.repeat(3, 1), ids.to_sparse(), "text", [[1], [2, 3]]],
        "prompts": [[[1, 2]], {"a": [1, 2]}, {("t",): [1]}, [[1], []], [[1.5]], ["text"], "text", [None], [ids],
                    [[99]]],
        "drafter": [draft, "none", "ngram", pair, ModelDrafter, NaiveMatch(), "no/such/folder", Strange(1),
                    target.model],
        "verifier": [NaiveMatch(), TopDown(NaiveMatch()), NaiveMatch, "optimal", "block", "nothing", "naive", Chain(2)],
        "policy": [EAGLE_25, "4,2,1", (2, 1), 3, Chain, "chain:0", (0,), ("a",), "eagle-2", "best-first:4", [1, 1]],
        "seed": [1, 2**63, -1, 2**70, "1", torch.tensor(1)],
        "generator": [torch.Generator(), 1],
        "streamer": [Strange(None)],
        "compile": [False],
        "past": [polydraft.stream(one, ids, keep_past=True, drafter="none", max_new_tokens=2).exhaust().past
                 for one in (target, target, draft)],
        "keep_past": [True, False],
        "time": [True, False],
        "batch_size": [1, 2, 0, 10**9],
        "per_prompt": [{}, {0: {"seed": 1}}, {0: {"seed": -1}}, {0: 1}, {5: {}}, {0: {"nonsense": 1}}],
        "max_new_tokens": [1, 4, 0, -3, 10**12, "4"],
        "max_length": [2, 5, 0, 10**9],
        "temperature": [0, 0.0, 0.7, -1, 1e-300, 1e300, "0.5", torch.tensor(0.5)],
        "top_k": [0, 3, -1, 2.5, 10**6],
        "top_p": [0.5, 0, 1, 2, "1"],
        "min_p": [0.1, -0.1, 2],
        "typical_p": [0.5, 0, 3],
        "repetition_penalty": [1.2, 0, -1, "a"],
        "eos_token_id": [3, [3, 4], -1, 10**6, [[1]], "a"],
        "pad_token_id": [0, -1, "a"],
        "stop_strings": ["a", [""], [], 3],
        "num_return_sequences": [1, 2, 0, 1.5],
        "attention_mask": [torch.ones(1, 3), torch.zeros(1, 3), torch.ones(3), torch.full((1, 3), 2), [[1, 1, 1]]],
        "logits_processor": [[Strange(answer)] for answer in answers] + [Strange(None), [None], [[Strange(None)]], "x"],
        "stopping_criteria": [[Strange(answer)] for answer in answers] + [Strange(True), [None], "x"],
        "prefix_allowed_tokens_fn": [lambda row, text: [1, 2], lambda row, text: [], lambda row, text: [99], 3],
        "bad_words_ids": [[[1]], [], [[]], [[99]], 3],
        "sequence_bias": [{(1,): 2.0}, {}, 3],
        "suppress_tokens": [[1], [99], "a"],
        "guidance_scale": [1.5, 0, "a"],
        "watermarking_config": [{"bias": 2.0}, 3, {"nonsense": 1}],
        "generation_config": [target.generation_config, {}, 3],
        "output_scores": [True, 1],
        "output_logits": [True],
        "return_dict_in_generate": [True],
        "num_beams": [1, 4],
        "assistant_model": [draft, 3],
        "prompt_lookup_num_tokens": [3, 0, "a"],
        "num_assistant_tokens": [3, 0],
        "inputs_embeds": [torch.zeros(1, 3, 16)],
        "tokenizer": [None],
        "nonsense": [1],
    }  # fmt: skip


def calls(number: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of functions and their arguments: mostly right, with one to three that are drawn."""
    choose = random.Random(seed)
    target = tiny_target(0, 8)
    draft = tiny_draft(target)
    pool = pools(target, draft)
    for _ in range(number):
        name = choose.choice(["generate", "generate", "stream", "generate_many"])
        many = name == "generate_many"
        usual: dict[str, Any] = {
            "model": target,
            "prompts" if many else "input_ids": [[1, 2, 3]] if many else pool["input_ids"][0],
        }
        usual |= {"drafter": draft, "max_new_tokens": 3}
        odd = [
            one
            for one in pool
            if one not in (("input_ids", "generator", "streamer") if many else ("prompts", "batch_size", "per_prompt"))
        ]
        for one in choose.sample(odd, choose.choice([1, 1, 2, 3])):
            usual[one] = choose.choice(choose.choice([pool[one], pool[one], NOTHING]))
        yield name, usual


def outcome(name: str, arguments: dict[str, Any]) -> str:
    """Return what came of a call: a kind of result, one of our errors, or what went wrong."""
    given = dict(arguments)
    places = [given.pop(one) for one in ("model", "prompts" if name == "generate_many" else "input_ids")]
    function: Callable[..., Any] = getattr(polydraft, name)
    began = time.monotonic()
    try:
        result = function(*places, **given)
        texts = list(result) if name != "generate" else [result]
        said = f"fine: {len(texts)}"
    except PolydraftError as error:
        text = str(error)
        said = "refused" if text.strip() and "\n" not in text and len(text) < 600 else f"RAW: not a sentence: {text!r}"
    except Exception as error:  # noqa: BLE001  this is what is looked for
        said = f"RAW: {''.join(traceback.format_exception(error)[-3:])}"
    took = time.monotonic() - began
    return said if took < PATIENCE else f"RAW: took {took:.0f} s"


def main(number: int, seed: int) -> None:
    """Try so many calls and print the counts and all that went wrong, as JSON."""
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    wrong: list[str] = []
    for name, arguments in calls(number, seed):
        said = outcome(name, arguments)
        kind = said.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "RAW":
            shown = {key: repr(value)[:80] for key, value in arguments.items() if key != "model"}
            wrong.append(f"{name} {shown}, model {type(arguments['model']).__name__}\n{said}")
    sys.stdout.write(json.dumps({"counts": counts, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
