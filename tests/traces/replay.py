"""Write the calls of agent traces again, with a target that says them: how many tokens a pass brings.

The traces (`agents.jsonl`) are ours, under the package's licence: conversations in which an assistant calls tools and
reads what they return. Every call is written behind the conversation before it, as a greedy target would that says
exactly this. So what is counted depends on the text, the drafter and the grammar, and on no model.

Run it for the table of docs/tools.md: `PYTHONPATH=tests python tests/traces/replay.py`.
"""

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tool_models import WITHOUT_THOUGHTS
from torch import Tensor

from polydraft.drafters import NgramDrafter, NoDraft, merge
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.choices import default_policy, default_verifier
from polydraft.engine.loop.step import begin, step
from polydraft.models import Cache, Facts, Forward, LanguageModel, Tool, answer_form, conversation_ids, load_tokenizer
from polydraft.models.generation.processors import Stateless
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.grammar.masks import GrammarLogitsProcessor, RowMask
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.trees import Chain

TRACES = Path(__file__).with_name("agents.jsonl")
GREEDY = SamplingParams(temperature=0.0)


class Nothing(Cache):
    """Keys of a target that needs none."""

    def keep(self, base: Tensor, path: Tensor) -> None: ...

    def put(self, row: int, other: Any, length: int) -> "Nothing":
        return self

    def select(self, rows: Sequence[int]) -> "Nothing":
        return self


class Saying(LanguageModel):
    """Says one text, whatever it has read: behind the i-th token its next one is the likeliest by far."""

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self.text, self.vocab_size = torch.tensor([*text, text[-1]]), vocab_size

    @property
    def facts(self) -> Facts:
        return Facts(self.vocab_size, 1 << 16, torch.device("cpu"))

    def new_cache(self, batch: int, capacity: int, sources: Any = None) -> Nothing:
        return Nothing()

    def forward(self, tokens: Tensor, positions: Tensor, *_: Any, **options: Any) -> Forward:
        own = self.text[(positions + 1).clamp_max(len(self.text) - 1)]
        logits = torch.zeros(*own.shape, self.vocab_size).scatter_(-1, own.unsqueeze(-1), 50.0)
        keep = options.get("logits_to_keep", 0)
        return Forward(logits[:, -keep:] if keep else logits, {})


def turns(tokenizer: Any, row: dict[str, Any]) -> list[tuple[list[int], str, list[Tool]]]:
    """Return, for every turn that calls, the tokens before it, what it says, and the tools."""
    tools = [Tool(one["name"], one["parameters"], strict=True) for one in row["tools"]]
    told = [{"type": "function", "function": one} for one in row["tools"]]
    found = []
    for place, one in enumerate(row["messages"]):
        if one.get("tool_calls"):
            calls = [call["function"] for call in one["tool_calls"]]
            said = "\n".join(
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'
                for call in calls
            )
            found.append((conversation_ids(tokenizer, row["messages"][:place], told), said, tools))
    return found


def spelt(tokenizer: Any, mask: RowMask, text: str) -> list[int]:
    """Return the tokens of a text that the grammar allows one after another, each the longest that does."""
    found, left, path = list[int](), text, b""
    pieces = {tokenizer.convert_tokens_to_string([name]): own for name, own in tokenizer.get_vocab().items()}
    longest = max(map(len, pieces))
    while left:
        state = mask.walk.state(path)
        assert state is not None, left
        words = [left[:size] for size in range(min(longest, len(left)), 0, -1) if left[:size] in pieces]
        token = next(pieces[word] for word in words if not state.bits[pieces[word] >> 3] >> (pieces[word] & 7) & 1)
        found.append(token)
        left, path = (
            left[len(tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(token)])) :],
            (path + token.to_bytes(8, "little")),
        )
    return found


def passes(drafter: Any, before: list[int], said: list[int], vocab_size: int, mask: RowMask | None) -> tuple[int, int]:
    """Return how many passes writing takes, and how many tokens are forced."""
    verifier = default_verifier(drafter, GREEDY)
    policy = Chain(1) if isinstance(drafter, NoDraft) else default_policy(drafter, GREEDY)
    target, size = Saying([*before, *said], vocab_size), len(before) + len(said)
    laws = (TargetLaw(GREEDY, () if mask is None else (Stateless(mask, "grammar"),), eos=frozenset((0,))),)
    text = Text(torch.tensor([before]), torch.tensor([len(before)]))
    batch = begin(
        target, Method(drafter, verifier, policy), Prompts(text, laws, (Ending(size),), Noise.from_seed(0, 1))
    )
    count, forced, written = 0, 0, list[int]()
    while batch.going:
        batch, block, _ = step(batch)
        count, forced, written = count + 1, forced + block.rows[0].forced, [*written, *block.rows[0].tokens]
    assert written == said
    return count, forced


def table(limit: int | None = None) -> dict[str, tuple[int, dict[str, int]]]:
    """Return, for every trace, the tokens of its calls, and the passes by arm."""
    tokenizer = deepcopy(load_tokenizer("pair"))
    tokenizer.chat_template = WITHOUT_THOUGHTS
    vocabulary, found = vocabulary_of(tokenizer, len(tokenizer)), dict[str, tuple[int, dict[str, int]]]()
    for line in TRACES.read_text().splitlines()[:limit]:
        row, tokens, arms = json.loads(line), 0, dict[str, int]()
        for before, text, tools in turns(tokenizer, row):
            form = answer_form(tokenizer, tools, choice="required", tool_format="hermes")
            own = GrammarLogitsProcessor(form.grammar, vocabulary)
            own = (
                own
                if hasattr(form.grammar, "mark")
                else GrammarLogitsProcessor(vocabulary.start(form.grammar), vocabulary)
            )
            mask = own.placed([len(before)], frozenset((0,))).rows[0]
            said = spelt(tokenizer, mask, text)
            tokens += len(said)
            for name, drafter in (("plain", NoDraft()), ("ngram", NgramDrafter()), ("default", merge())):
                for held in (None, mask):
                    arm = name + (", held" if held else "")
                    arms[arm] = arms.get(arm, 0) + passes(drafter, before, said, len(tokenizer), held)[0]
        found[row["id"]] = tokens, arms
    return found


if __name__ == "__main__":
    for trace, (tokens, arms) in table().items():
        told = "  ".join(f"{arm}: {count} ({tokens / count:.2f})" for arm, count in arms.items())
        sys.stdout.write(f"{trace}: {tokens} tokens; {told}\n")
