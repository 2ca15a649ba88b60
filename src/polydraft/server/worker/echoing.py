"""Prompts that are told back: their text, and how likely the model holds their tokens, in chunks between the steps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from polydraft.models import StreamDecoder, cache_in
from polydraft.server.worker.answer_text import spelt
from polydraft.server.worker.asking import TextRequest
from polydraft.server.worker.asks import Ask
from polydraft.server.worker.served import LoadedModels

SCORED = 256
"""Rows of log-probabilities that are in double precision at a time."""


class Echo:
    """A request whose prompts are told; every `step` reads as much of one as a chunk has, and nobody waits for more.

    Args:
        served: the models.
        ask: the request.
        texts: what it asks for.
        begun: what is to be said of it when its prompts are read.

    Attributes:
        told: what was found of each prompt.
    """

    def __init__(self, served: LoadedModels, ask: Ask, texts: Sequence[TextRequest], begun: Mapping[str, Any]) -> None:
        self.served, self.ask, self.texts, self.begun = served, ask, texts, begun
        self.told: list[dict[str, Any]] = []
        self._left = self._steps()

    def step(self) -> bool:
        """Read on; tell whether there is no more to read."""
        return next(self._left, None) is None

    def _steps(self) -> Iterator[bool]:
        """Go through the prompts, with a stop behind every chunk but the last."""
        for place, one in enumerate(self.texts[:: self.ask.n]):
            if place:
                yield True
            echo = {"text": self.served.text(one.tokens, skip=not self.ask.special), "tokens": list(one.tokens)}
            if self.ask.logprobs is not None:
                first = {
                    "token": one.tokens[0],
                    "text": self.served.spelling(one.tokens[0]),
                    "logprob": None,
                    "top": [],
                }
                echo["logprobs"] = [first]
                decoder = StreamDecoder(self.served.tokenizer, skip_special_tokens=not self.ask.special)
                decoder.add(one.tokens[0])
                for chunk in self._chunks(one.tokens):
                    echo["logprobs"] += chunk
                    decoder.add([told["token"] for told in chunk])
                    if len(echo["logprobs"]) < len(one.tokens):
                        yield True
                for told, begin in zip(echo["logprobs"], decoder.begins, strict=True):
                    told["offset"] = min(begin, len(echo["text"]))
            self.told.append(echo)

    def _chunks(self, tokens: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yield the log-probabilities of the tokens behind the first, each given those before it.

        A model that gives nothing back to go on from reads the whole at once.
        """
        given = torch.tensor([list(tokens)], device=self.served.target.device)
        last, size = len(tokens) - 1, self.served.settings.chunk
        begin, past = 0, None
        while begin < last:
            end = min(begin + size, last)
            logits, past = self._passed(given[:, begin:end], past, keeps=end < last)
            if past is None and end < last:
                begin, end = 0, last
                logits, past = self._passed(given[:, :last], None, keeps=False)
            yield self._scored(logits, given[0, begin + 1 : end + 1])
            begin = end

    @torch.inference_mode()
    def _passed(self, tokens: torch.Tensor, past: Any, *, keeps: bool) -> tuple[torch.Tensor, Any]:
        """Return the logits of a pass behind what was read, and what the next one may go on from."""
        before = {} if past is None else {self.served.target.cached_as: past}
        output = self.served.target.model(input_ids=tokens, use_cache=keeps or past is not None, **before)
        after = cache_in(output)
        return output.logits[0], past if after is None else after

    @torch.inference_mode()
    def _scored(self, logits: torch.Tensor, after: torch.Tensor) -> list[dict[str, Any]]:
        """Return how likely each token is behind its row of logits."""
        told, top = list[dict[str, Any]](), self.ask.logprobs or 0
        for some, tokens in zip(logits.split(SCORED), after.split(SCORED), strict=True):
            rows = some.double().log_softmax(dim=-1)
            values, ids = (found.tolist() for found in rows.topk(min(top, rows.shape[-1]), dim=-1))
            own = rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
            likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            told += [spelt(self.served, *one) for one in zip(tokens.tolist(), own, likeliest, strict=True)]
        return told
