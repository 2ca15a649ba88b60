"""What the draft and the target say at every position of a text that the target has generated."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, NoDraft
from polydraft.engine import stream
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel, LanguageModel, Pair
from polydraft.probs import SamplingParams, shortlist, to_atoms, to_probs
from polydraft_lab.limits.reading import Reading, read

FALL = 30.0
"""By how much the logarithm of a draft probability falls from rank to rank where the draft temperature is zero."""


@dataclass(frozen=True, eq=False)
class Models:
    """A pair as the measurements use it.

    Args:
        pair: target, draft model and tokenizer.
        target: the target, ready to score trees.
        draft: the draft model, ready to score trees; of no use where there is a drafter.
        drafter: whose drafts are measured; None for those of the draft model at every position.
    """

    pair: Pair
    target: LanguageModel
    draft: LanguageModel
    drafter: Drafter | None = None

    @property
    def room(self) -> int:
        """The longest text that those can read whose rows are measured."""
        return min(self.target.facts.context, self.draft.facts.context)

    @classmethod
    def of(cls, pair: Pair, drafter: Drafter | None = None) -> "Models":
        """Return the pair's models, and a drafter if its drafts are to be measured.

        Raises:
            InvalidParameter: there is neither a draft model nor a drafter.
        """
        if drafter is not None:
            target = HuggingFaceModel(pair.target)
            return cls(pair, target, target, drafter)
        if pair.draft is None:
            raise InvalidParameter("The limits of drafting need a draft model: give --draft beside --target.")
        models = HuggingFaceModel(pair.target), HuggingFaceModel(pair.draft)
        unable = [type(one.model).__name__ for one in models if not one.facts.branches]
        if unable:
            raise UnsupportedModel(f"Limits are measured on trees, but {unable[0]} scores chains only.")
        return cls(pair, *models)


@dataclass(frozen=True, eq=False)
class Sample:
    """A generated text as both models read it.

    Args:
        tokens: prompt and generated tokens but for the last, which is never a context.
        first: the place of the first root: the prompt's last token.
        target: the target's reading; its rows of logits are those after the roots.
        draft: the draft's reading.
    """

    tokens: Int[Tensor, " t"]
    first: int
    target: Reading
    draft: Reading

    @property
    def positions(self) -> int:
        """The number of generated tokens, each a position at which drafts can be verified."""
        return len(self.tokens) - self.first


@torch.no_grad()
def generate_sample(
    models: Models, ids: Int[Tensor, "1 t"], temperature: float, max_tokens: int, seed: int, room: int
) -> Sample:
    """Continue a prompt with the target alone, and let both models read the result.

    Without drafts the text does not depend on the draft model: two drafts of one target are measured on one text.

    Args:
        models: the pair.
        ids: the prompt.
        temperature: the target's.
        max_tokens: how many tokens to generate at most.
        seed: fixes the text.
        room: how many tree nodes will be scored below the text at once.

    Raises:
        ContextOverflow: the prompt leaves no room for a token.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature else {"temperature": 0.0}
    limit = max(1, min(max_tokens, models.draft.facts.context - ids.shape[1]))
    run = stream(models.pair.target, ids, drafter=NoDraft(), seed=seed, max_new_tokens=limit, **sampling).exhaust()
    new = torch.tensor(run.new_tokens[0], device=ids.device)
    tokens = torch.cat([ids[0], new[:-1]])
    readings = (read(model, tokens.to(model.facts.device), len(new), room) for model in (models.target, models.draft))
    return Sample(tokens, ids.shape[1] - 1, *readings)


def draft_rows(
    logits: Float[Tensor, "*b V"], temperature: float, size: int
) -> tuple[Int[Tensor, "*b K"], Float[Tensor, "*b K"]]:
    """Return the draft's shortlist and its probabilities at a temperature, renormalised.

    Temperature 0 is the limit from above: probabilities fall so steeply with the rank that independent drafts are all
    the likeliest token and drafts without replacement are the k likeliest, in order, but for 1e-12.
    """
    if temperature > 0:
        return shortlist(logits, SamplingParams(temperature=temperature), size)
    tokens, probs = shortlist(logits, SamplingParams(), size)
    ranks = torch.arange(probs.shape[-1], dtype=probs.dtype, device=probs.device)
    return tokens, (-FALL * ranks).softmax(dim=-1).expand(probs.shape).contiguous()


def rows_on_atoms(
    sample: Sample, temperature: float, draft_temperature: float, size: int
) -> tuple[Float[Tensor, "m A"], Float[Tensor, "m A"]]:
    """Return the draft's and the target's rows at every position, on the draft's K likeliest tokens and the tail."""
    shared = sample.target.logits.shape[-1]
    tokens, probs = draft_rows(sample.draft.logits[:, :shared], draft_temperature, size)
    target = to_probs(sample.target.logits, SamplingParams(temperature=temperature))
    return torch.nn.functional.pad(probs, (0, 1)), to_atoms(target, tokens.to(target.device))
