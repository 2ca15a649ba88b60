"""A copy of the model that a server has: its law behind texts, and which tokens a server's text was."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.conformance.http.engines import SampledText
from polydraft.conformance.http.features import SENTENCE_ENDS
from polydraft.engine import stream
from polydraft.errors import InvalidParameter, ServerError
from polydraft.models import Message, bytes_of, conversation_ids, text_of
from polydraft.probs import SamplingParams, to_probs

MOST_NUMBERS = 1 << 25
"""Logits of a pass."""
SAMPLED, LENGTH = 64, 64
"""Texts of the copy's own, and their tokens, that are spelt and tokenised again."""


class CopiedModel:
    """A model with its tokenizer, and a draft model with the same tokens if one is named.

    Args:
        model: the target; its passes give the law.
        tokenizer: its tokenizer.
        draft: the draft model that the server is said to use.
        params: how the server is asked to sample.

    Raises:
        InvalidParameter: there is no tokenizer, or the temperature is 0.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, draft: nn.Module | None, params: SamplingParams) -> None:
        if tokenizer is None:
            raise InvalidParameter("The copy's folder has no tokenizer, which says what a server's texts are: add it.")
        if params.temperature == 0:
            raise InvalidParameter("temperature is 0, where a server draws nothing: test it above 0.")
        self.model, self.tokenizer, self.draft, self.params = model, tokenizer, draft, params
        config: Any = getattr(model, "generation_config", None)
        told = getattr(config, "eos_token_id", None)
        self.ends: tuple[int, ...] = () if told is None else (told,) if isinstance(told, int) else tuple(told)

    @cached_property
    def size(self) -> int:
        """The size of the vocabulary, as the model's rows have it."""
        return self.rows(self.model, [0], [[0]], self.params)[0].shape[-1]

    @property
    def sentence_ends(self) -> list[int]:
        """Tokens whose text ends a sentence."""
        known = range(min(self.size, len(self.tokenizer)))
        return [one for one in known if text_of(self.tokenizer, [one]).rstrip(" ").endswith(SENTENCE_ENDS)]

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return [int(one) for one in self.tokenizer(text, add_special_tokens=special)["input_ids"]]

    def chat_ids(self, text: str) -> list[int]:
        """Return the tokens of a chat in which a user says a text, up to where the answer begins.

        Raises:
            InvalidParameter: there is no chat template.
        """
        return conversation_ids(self.tokenizer, [Message("user", text)])

    def spelling(self, token: int) -> str:
        """Return the text of a token."""
        return text_of(self.tokenizer, [token], False)

    @torch.no_grad()
    def rows(
        self, model: nn.Module, prompt: Sequence[int], texts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Float[Tensor, "t V"]]:
        """Return a model's law at every token of each text, by ordinary passes over whole texts without a cache."""
        device, found = next(model.parameters()).device, list[Tensor]()
        longest = max(len(text) for text in texts)
        given = torch.zeros(len(texts), len(prompt) + longest, dtype=torch.long, device=device)
        for row, text in enumerate(texts):  # what stands behind a text changes nothing before it
            given[row, : len(prompt) + len(text)] = torch.tensor([*prompt, *text], device=device)
        size = 1 if "size" not in self.__dict__ else max(1, MOST_NUMBERS // (given.shape[1] * self.size))
        for part in range(0, len(texts), size):
            logits = model(input_ids=given[part : part + size, :-1], use_cache=False).logits[:, len(prompt) - 1 :]
            for row, text in zip(logits, texts[part : part + size], strict=True):
                found.append(self._ends_merged(to_probs(row[: len(text)].double(), params).cpu()))
        return found

    def _ends_merged(self, law: Float[Tensor, "t V"]) -> Float[Tensor, "t V"]:
        """Return a law in which all ends of text are one outcome: which of them it was a server may not say."""
        if len(self.ends) > 1:
            law = law.clone()
            law[:, self.ends[0]] = law[:, list(self.ends)].sum(dim=-1)
            law[:, list(self.ends[1:])] = 0
        return law

    def outcomes(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens as outcomes of the law."""
        return [self.ends[0] if token in self.ends else token for token in tokens]

    def read(self, sample: SampledText, where: str) -> tuple[list[int], bool]:
        """Return the tokens of a text, and whether they are those that were sampled, not those of its text.

        Raises:
            ServerError: a token that the copy does not have.
        """
        tokens, sure = self._told_tokens(sample), True
        if tokens is None:
            tokens, sure = self.ids(sample.text, special=False), False
        strange = next((one for one in tokens if not 0 <= one < self.size), None)
        if strange is not None:
            raise ServerError(
                f"{where} wrote the token {strange}, but the copy's tokens are 0 to {self.size - 1}: it is a copy of "
                "another model."
            )
        if sample.stopped and self.ends and (not tokens or tokens[-1] not in self.ends):
            tokens = [*tokens, self.ends[0]]
        return tokens, sure

    def _told_tokens(self, sample: SampledText) -> list[int] | None:
        if sample.tokens is not None:
            return [*sample.tokens]
        if not sample.told:
            return None
        found = [one.id if one.id is not None else self._by_spelling.get(one.spelling) for one in sample.told]
        return None if any(one is None for one in found) else [one for one in found if one is not None]

    @cached_property
    def _by_spelling(self) -> dict[bytes, int | None]:
        """Tokens by their bytes; None where two have the same."""
        found = dict[bytes, int | None]()
        for token in range(min(self.size, len(self.tokenizer))):
            spelling = bytes_of(self.tokenizer, token)
            found[spelling] = None if spelling in found else token
        return found

    def differs(self, samples: Sequence[SampledText]) -> bool:
        """Tell whether most texts are not what the copy's tokenizer makes of their tokens: it is another tokenizer."""
        told = [(one.tokens, one.text) for one in samples if one.tokens]
        wrong = sum(_plain(text_of(self.tokenizer, one, False)) != _plain(text) for one, text in told)
        without = sum(_plain(text_of(self.tokenizer, one, True)) != _plain(text) for one, text in told)
        return bool(told) and min(wrong, without) > len(told) / 2

    def lost_by_spelling(self, prompts: Sequence[Sequence[int]], seed: int = 0) -> float:
        """Return which share of the copy's own tokens does not come back from their text, from the first wrong one on.

        So often a text that is told without its tokens is not what was sampled.
        """
        lost = total = 0
        for own in self._own_texts(prompts, seed):
            again = self.ids(text_of(self.tokenizer, own), special=False)
            same = next((at for at, (one, other) in enumerate(zip(own, again, strict=False)) if one != other), len(own))
            lost, total = lost + len(own) - min(same, len(again)), total + len(own)
        return lost / max(total, 1)

    def _own_texts(self, prompts: Sequence[Sequence[int]], seed: int) -> Iterator[list[int]]:
        options: dict[str, Any] = {"temperature": self.params.temperature, "top_k": self.params.top_k}
        options |= {"top_p": self.params.top_p, "max_new_tokens": LENGTH, "drafter": "none"}
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)] * max(1, SAMPLED // len(prompts)))
            run = stream(self.model, ids, attention_mask=torch.ones_like(ids), seed=seed + number, **options)
            yield from run.exhaust().new_tokens


def _plain(text: str) -> str:
    return text.replace("\ufffd", "").strip()
