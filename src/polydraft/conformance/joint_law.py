"""The exact joint law of the next n tokens after a prompt, from a model or from a function of the context."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.conformance.evidence import JointLaw
from polydraft.errors import InvalidParameter, is_whole
from polydraft.probs import SamplingParams, check_probs, to_probs

MOST_OUTCOMES = 100_000
ROWS_PER_PASS = 2048

NextLaw = Callable[[list[int]], Float[Tensor, " V"]]
"""Gives the next token's probabilities after a context of token ids."""


def joint_law(target: nn.Module | NextLaw, prompt: Sequence[int], new_tokens: int, params: SamplingParams) -> JointLaw:
    """Return the law of the next tokens by asking the target about every continuation of the prompt.

    Args:
        target: a causal model, whose logits `params` turn into probabilities, or a function that gives the next
            token's probabilities after a context, which are taken as they are.
        prompt: token ids, at least one.
        new_tokens: n; V ** n outcomes are listed.
        params: temperature and filters for a model's logits.

    Raises:
        InvalidParameter: V ** n is over 100000, an empty prompt or one with tokens outside the vocabulary, or
            `params` for a target that gives probabilities.
        InvalidProbabilities: rows that are no distributions.
    """
    _check_request(target, prompt, new_tokens, params)
    law = torch.ones(1, dtype=torch.float64)
    size = 1
    for length in range(new_tokens):
        contexts = [[*prompt, *text] for text in product(range(size), repeat=length)]
        rows = _model_rows(target, contexts, params) if isinstance(target, nn.Module) else _rows(target, contexts)
        if length == 0:
            size = rows.shape[-1]
            _check_size(size, new_tokens, prompt)
        law = (law.unsqueeze(-1) * rows / rows.sum(dim=-1, keepdim=True)).flatten()
    return JointLaw(law.view([size] * new_tokens))


def _check_request(target: nn.Module | NextLaw, prompt: Sequence[int], new_tokens: int, params: SamplingParams) -> None:
    if not is_whole(new_tokens) or new_tokens < 1:
        raise InvalidParameter(f"new_tokens must be at least 1, but is {new_tokens!r}.")
    if not prompt or min(prompt) < 0:
        raise InvalidParameter(f"A prompt must be token ids, at least one and none negative, but is {list(prompt)}.")
    if not isinstance(target, nn.Module) and params != SamplingParams():
        raise InvalidParameter(
            f"{params} applies to a model's logits, but the target is a function that gives probabilities; "
            "let it apply them."
        )


def _check_size(size: int, new_tokens: int, prompt: Sequence[int]) -> None:
    if size**new_tokens > MOST_OUTCOMES:
        raise InvalidParameter(
            f"A vocabulary of {size} tokens has {size**new_tokens} continuations of {new_tokens} tokens; at most "
            f"{MOST_OUTCOMES} can be listed: take fewer new_tokens, or a model with a smaller vocabulary."
        )
    if max(prompt) >= size:
        raise InvalidParameter(f"The prompt has token {max(prompt)}, but the target's vocabulary has {size} tokens.")


@torch.no_grad()
def _model_rows(model: nn.Module, contexts: list[list[int]], params: SamplingParams) -> Float[Tensor, "b V"]:
    """Score contexts of one length by ordinary passes, without a cache."""
    device = next(model.parameters()).device
    rows: list[Tensor] = []
    for first in range(0, len(contexts), ROWS_PER_PASS):
        ids = torch.tensor(contexts[first : first + ROWS_PER_PASS], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        rows.append(to_probs(logits, params).double().cpu())
    return torch.cat(rows)


def _rows(next_law: NextLaw, contexts: list[list[int]]) -> Float[Tensor, "b V"]:
    rows = torch.stack([torch.as_tensor(next_law(context)).double().cpu().flatten() for context in contexts])
    check_probs(rows, "The target's law")
    return rows
