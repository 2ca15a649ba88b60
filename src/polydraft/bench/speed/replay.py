"""Replay: the target writes a text that is known, so that drafts are measured on texts that it would not write itself.

A small model hardly edits a file as it is asked to. So its answer is given: whatever its logits are, those of the known
text's next token stay and all others are shut. Passes and drafts cost what they do elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.bench.prompts import Prompt
from polydraft.errors import InvalidParameter
from polydraft.models import Pair


class Replay:
    """A logits processor that leaves one token alone at each place: those of a known text, then the end of text.

    It depends on its arguments alone, so it works at every node of a tree. Hugging Face's drafters call the processors
    of their target, which would tell them the text; in their loops the logits are changed as they leave the model.

    Args:
        prompts: the rows that are continued, padded on the left.
        texts: what is written behind each.
        end: the token that ends a text.
        names: what the rows are called in errors; () for their numbers.

    Raises:
        InvalidParameter: two rows have one prompt and different texts: no history tells at which of them it is.
    """

    stateless = True

    def __init__(
        self, prompts: Int[Tensor, "b t"], texts: Sequence[Sequence[int]], end: int, names: Sequence[str] = ()
    ) -> None:
        rows, longest = prompts.tolist(), max(map(len, texts))
        for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
            first = rows.index(row)
            if [*texts[first]] != [*text]:
                told = names or [str(number) for number in range(len(rows))]
                raise InvalidParameter(
                    f"The rows {told[first]} and {told[place]} have one prompt and different texts, which cannot be "
                    "replayed in one batch; measure with batches of one, or leave one of them out."
                )
        self.prompts = prompts
        self.tokens = prompts.new_tensor([[*text, *[end] * (longest + 1 - len(text))] for text in texts])

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Shut all tokens but the one that comes next, of the row whose prompt the history begins with."""
        prompt = self.prompts.shape[1]
        row = (history[:, None, :prompt] == self.prompts).all(dim=-1).int().argmax(dim=-1)
        at = min(history.shape[1] - prompt, self.tokens.shape[1] - 1)
        return _alone(scores, self.tokens[row, at])

    def behind(self, logits: Float[Tensor, "b n V"], stop: int) -> Float[Tensor, "b n V"]:
        """Do the same with a model's logits behind its last tokens, `stop` tokens being known then."""
        places = torch.arange(logits.shape[1], device=logits.device) + stop + 1 - logits.shape[1]
        at = (places - self.prompts.shape[1]).clamp(0, self.tokens.shape[1] - 1)
        return _alone(logits, self.tokens[:, at])


def _alone(scores: Float[Tensor, "*b V"], tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b V"]:
    shut, kept = torch.full_like(scores, -torch.inf), tokens.unsqueeze(-1)
    return shut.scatter(-1, kept, scores.gather(-1, kept))


def check_known(prompts: Sequence[Prompt], *, replay: bool, predicts: bool = False) -> None:
    """Check that prompts have a known text, if it is replayed, and a file, if it is drafted from.

    Raises:
        InvalidParameter: one has not, which is named.
    """
    unknown = next((one for one in prompts if replay and not one.edited), None)
    if unknown is not None:
        raise InvalidParameter(
            f"--replay writes the text that a row has as edited or reference, but the prompt {unknown.name!r} of "
            f"{unknown.task} has none."
        )
    bare = next((one for one in prompts if predicts and not one.file), None)
    if bare is not None:
        raise InvalidParameter(
            f"The arm prediction drafts from the file that a row has, but the prompt {bare.name!r} of {bare.task} has "
            "none."
        )


def known_ids(pair: Pair, text: str) -> tuple[int, ...]:
    """Return a known text's token ids, which stand behind others."""
    return tuple(pair.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def end_ids(model: Any) -> list[int]:
    """Return the tokens with which the model ends a text; none if it names none."""
    named = model.generation_config.eos_token_id
    return [] if named is None else [int(one) for one in (named if isinstance(named, list | tuple) else [named])]


def end_of(model: Any) -> int:
    """Return the token that ends a replayed text.

    Raises:
        InvalidParameter: the model names none.
    """
    ends = end_ids(model)
    if not ends:
        raise InvalidParameter("--replay ends a text by the target's end-of-text token, but the target names none.")
    return ends[0]
