"""Servers as small doubles: a model that looks one token back, and ways to write that are right or wrong."""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerFast

SIZE, LEANING = 600, 0.4
CHARACTERS = ["\n", *map(chr, range(32, 127)), *map(chr, range(0x4E00, 0x4E00 + SIZE - 96))]
Law = Callable[[Tensor, Tensor, Generator], Tensor]
"""Draws tokens from rows of the target's law and of the draft's."""


class Bigram(nn.Module):
    """A model whose scores depend on the last token alone."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(rows.log(), requires_grad=False)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


def zipf_rows(seed: int, size: int = SIZE) -> Tensor:
    """Return rows like those of language models: a few likely tokens and a long tail."""
    stream = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(size):
        row = torch.arange(1, size + 1, dtype=torch.float64) ** -(1.0 + 0.5 * float(torch.rand(1, generator=stream)))
        rows.append(row[torch.randperm(size, generator=stream)])
    found = torch.stack(rows)
    return found / found.sum(dim=-1, keepdim=True)


def models_of(size: int = SIZE) -> tuple[Bigram, Bigram]:
    """Return a target, and a draft whose rows are partly others."""
    target = zipf_rows(1, size)
    return Bigram(target), Bigram((1 - LEANING) * target + LEANING * zipf_rows(2, size))


def character_tokenizer(size: int) -> PreTrainedTokenizerFast:
    own = Tokenizer(models.WordLevel({one: number for number, one in enumerate(CHARACTERS[:size])}, unk_token=" "))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    own.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=own, clean_up_tokenization_spaces=False)


def drawn(rows: Tensor, stream: Generator) -> Tensor:
    return torch.multinomial(rows, 1, generator=stream).squeeze(-1)


def picked(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().sum(dim=-1, keepdim=True) / 2


def right(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    return drawn(target, stream)


def lenient(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    """Lean towards the draft by a total variation of .02 in every place."""
    return drawn(target + 0.02 / distance(target, draft) * (draft - target), stream)


def tempered(rows: Tensor, temperature: float) -> Tensor:
    found = rows ** (1 / temperature)
    return found / found.sum(dim=-1, keepdim=True)


def temperature_of(rows: Tensor, variation: float) -> float:
    """Return the temperature below 1 that moves rows by a mean total variation."""
    low, high = 0.5, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        below = float(distance(tempered(rows, middle), rows).mean()) > variation
        low, high = (middle, high) if below else (low, middle)
    return low


COLD = temperature_of(zipf_rows(1), 0.02)


def colder(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    return drawn(tempered(target, COLD), stream)


def cut_to(count: int) -> Law:
    def write(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
        least = target.topk(count, dim=-1).values[:, -1:]
        return drawn(target * (target >= least), stream)

    return write


def min_p(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    return drawn(target * (target >= 0.05 * target.max(dim=-1, keepdim=True).values), stream)


def duplicates_skipped(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    """Reject four drafts one after the other, and leave the residual as it was where one comes again."""
    draft = tempered(draft, 0.5)  # of a sharp draft more come again
    left, found, seen = target.clone(), torch.full((len(target),), -1), []
    for _ in range(4):
        token = drawn(draft, stream)
        again = torch.stack([token == one for one in seen]).any(dim=0) if seen else torch.zeros_like(token).bool()
        seen.append(token)
        chance = torch.rand(len(token), generator=stream, dtype=torch.float64)
        accepted = (chance < picked(left, token) / picked(draft, token)) & ~again & (found < 0)
        found = torch.where(accepted, token, found)
        rest = (left - draft).clamp_min(0)
        rest = rest / rest.sum(dim=-1, keepdim=True)
        left = torch.where(again.unsqueeze(-1), left, rest)
    return torch.where(found < 0, drawn(left, stream), found)


def noise_shared(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    """Draw a draft and accept it by one and the same uniform number."""
    chance = torch.rand(len(target), 1, generator=stream, dtype=torch.float64)
    token = (draft.cumsum(dim=-1) < chance).sum(dim=-1).clamp_max(target.shape[-1] - 1)
    accepted = chance.squeeze(-1) < picked(target, token) / picked(draft, token)
    return torch.where(accepted, token, drawn((target - draft).clamp_min(0), stream))


def greedy_under_drafts(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    """Accept a draft if it is the likeliest token; else draw."""
    token, best = drawn(draft, stream), target.argmax(dim=-1)
    return torch.where(token == best, best, drawn(target, stream))


def greedy(target: Tensor, draft: Tensor, stream: Generator) -> Tensor:
    return target.argmax(dim=-1)


class Double:
    """A server in vLLM's shape that answers in this process, and notes what it was asked."""

    def __init__(self, law: Law = right, *, owner: str = "vllm", size: int = SIZE, **wrong: Any) -> None:
        self.law, self.owner, self.wrong = law, owner, wrong
        self.target, self.draft = models_of(size)
        self.tokenizer = character_tokenizer(size)
        self.asked: list[dict[str, Any]] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": self.owner, "root": "m"}]})
        fields = json.loads(request.content)
        self.asked.append(fields)
        return httpx.Response(200, json=self.completion(fields))

    def texts(self, prompt: Sequence[int], count: int, length: int, seed: int) -> Tensor:
        stream = torch.Generator().manual_seed(seed)
        rows, drafts = self.target.table.exp(), self.draft.table.exp()
        found = torch.full((count, 1), prompt[-1])
        for _ in range(length):
            found = torch.cat([found, self.law(rows[found[:, -1]], drafts[found[:, -1]], stream).unsqueeze(-1)], dim=1)
        return found[:, 1:]

    def completion(self, fields: dict[str, Any]) -> dict[str, Any]:
        prompt = fields["prompt"]
        seed = 0 if self.wrong.get("seedless") else fields["seed"]
        texts = self.texts(prompt, fields["n"], self.wrong.get("length", fields["max_tokens"]), seed)
        if self.wrong.get("same_choices"):
            texts = texts[:1].expand_as(texts)
        choices = []
        for number, text in enumerate(texts.tolist()):
            told = self._logprobs([prompt[-1], *text[:-1]], text, fields["logprobs"]) if "logprobs" in fields else None
            shown = self.wrong.get("text", self.tokenizer.decode(text))
            ids = [one + self.wrong.get("shift", 0) for one in text]
            choices.append(
                {"index": number, "text": shown, "token_ids": ids, "finish_reason": "length", "logprobs": told}
            )
        usage = {"prompt_tokens": len(prompt) + self.wrong.get("more", 0)}
        return {"choices": choices, "usage": usage}

    def _logprobs(self, before: list[int], text: list[int], count: int) -> dict[str, Any]:
        rows = self.target.table[torch.tensor(before)]
        own = rows.gather(-1, torch.tensor(text).unsqueeze(-1)).squeeze(-1).tolist()
        values, tokens = rows.topk(min(count, rows.shape[-1]), dim=-1)
        zero = self.wrong.get("zeros")
        return {
            "tokens": [CHARACTERS[one] for one in text],
            "token_logprobs": [0.0] * len(text) if zero else own,
            "top_logprobs": [
                {CHARACTERS[token]: value for token, value in zip(*pair, strict=True)}
                for pair in zip(tokens.tolist(), values.tolist(), strict=True)
            ],
        }
