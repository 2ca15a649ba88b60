"""Consistency training (CLLM): from any state of a Jacobi iteration the rows shall be those of its end.

A step reads texts and, behind each block's root, one state y of the block's trajectory, drawn at random from those that
are not its end. With y* the text's own tokens and f the first place where both differ:

    consistency   mean over places i >= f of  -sum_v t_i(v) log q(v | x, y_{<= i})
    the text      mean over the text's places of  L_i
    loss          consistency + weight * the text

| keep   | t_i                                            | L_i                                                        |
|--------|------------------------------------------------|------------------------------------------------------------|
| tokens | the model's own row q(. | x, y*_{<= i}), fixed | cross entropy of the text's token, labels smoothed by .1   |
| law    | the target's row p(. | x, y*_{<= i})           | KL(p || q)                                                 |

The first is CLLM's, whose texts are all greedy: the model's law drifts towards the tokens. The second is ours; it
pulls the law back, and it is how a draft learns, whose end is the target's text. Blocks that repeat what stands before
them teach nothing and are left out of the consistency.

Source: CLLM (arXiv 2403.00835, sections 3.2 and 3.3, global consistency); hao-ai-lab/Consistency_LLM,
`cllm/cllm_trainer_global.py`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.training.consistency.trajectories import BlockReader, answers_of, block_roots, repeating
from polydraft.training.heads.losses.masked_training import with_copies, without_copies
from polydraft.training.heads.losses.row_losses import (
    Learner,
    TargetEnds,
    agreement,
    few_at_a_time,
    forward_divergence,
    soft_cross_entropy,
)

KEEPS = TOKENS, LAW = "tokens", "law"
SMOOTHING = 0.1
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ConsistencySettings:
    """How a model learns consistency.

    Args:
        block: n, how many tokens a block has.
        keep: what it keeps to on the text: "tokens" or "law".
        weight: what the text counts beside the consistency.

    Raises:
        InvalidParameter: a block without a place to learn at, another word, or a negative weight.
    """

    block: int = 16
    keep: str = TOKENS
    weight: float = 10.0

    def __post_init__(self) -> None:
        if self.block < 2:
            raise InvalidParameter(f"A block has 2 tokens or more, but {self.block} are asked for.")
        if self.keep not in KEEPS:
            raise InvalidParameter(f"keep is {' or '.join(KEEPS)}, not {self.keep!r}.")
        if not 0 <= self.weight < float("inf"):
            raise InvalidParameter(f"weight is a finite number of 0 or more, but is {self.weight}.")


class ConsistencyTraining(Learner):
    """A model with the loss of consistency; all of its weights learn.

    Args:
        network: the model, in single precision: a copy of the target, or a draft for it.
        vocab_size: the target's number of tokens.
        settings: how it learns.
        target: the target's ends, if the model learns the target's rows.

    Raises:
        InvalidParameter: the target's rows are to be learnt, and its ends are not given.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        vocab_size: int,
        settings: ConsistencySettings = ConsistencySettings(),
        target: TargetEnds | None = None,
    ) -> None:
        super().__init__()
        if settings.keep == LAW and target is None:
            raise InvalidParameter("To learn the target's rows takes its output rows: give target.")
        self.network, self.settings = network, settings
        self.reader = BlockReader(network, vocab_size)
        self.target = (target,)  # a tuple, so that it is no part of what is trained and saved
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        valid: Shaped[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
        guesses: Int[Tensor, "b B n n"],
    ) -> dict[str, Tensor]:
        """Return the `loss`, and for each place of a block the mean `overlap` of its row with t, and the `count`."""
        some, wrong = drawn_states(guesses, answers_of(ids, self.settings.block))
        states = self.reader.states(ids, some)
        roots = block_roots(ids.shape[1], self.settings.block)
        places = roots.unsqueeze(-1) + 1 + torch.arange(self.settings.block - 1)  # whose next token is in the block
        asked = wrong[..., :-1] & valid[:, places + 1].bool() & ~repeating(ids, self.settings.block).unsqueeze(-1)
        labels = (final if self.settings.keep == LAW else states.text.detach())[:, places]
        values, shared = few_at_a_time(self._consistency, states.guesses[:, :, :-1][asked], labels[asked])
        there = valid[:, 1:].bool()
        on_text = (final if self.settings.keep == LAW else ids.unsqueeze(-1).roll(-1, 1))[:, :-1][there]
        kept, _ = few_at_a_time(self._on_text, states.text[:, :-1][there], on_text)
        counts = asked.sum((0, 1))
        levels = torch.arange(self.settings.block - 1, device=ids.device).expand_as(asked)[asked]
        overlap = torch.zeros_like(counts, dtype=torch.float32).index_add(0, levels, shared) / counts.clamp_min(1)
        loss = values.sum() / max(len(values), 1) + self.settings.weight * kept.sum() / max(len(kept), 1)
        return {"loss": loss, "overlap": overlap, "count": counts}

    def _consistency(self, states: Float[Tensor, "m d"], labels: Float[Tensor, "m e"]) -> Pair:
        logits, law = self.reader.logits(states), self._law(labels, own=self.settings.keep == TOKENS)
        law = law[..., : logits.shape[-1]]
        return soft_cross_entropy(logits, law), agreement(logits.detach(), law)

    def _on_text(self, states: Float[Tensor, "m d"], labels: Tensor) -> Pair:
        logits = self.reader.logits(states)
        if self.settings.keep == LAW:
            found = forward_divergence(logits, self._law(labels, own=False)[..., : logits.shape[-1]])
        else:
            known = labels.squeeze(-1)
            known = known.where(known < logits.shape[-1], -1)
            found = functional.cross_entropy(
                logits, known, reduction="none", ignore_index=-1, label_smoothing=SMOOTHING
            )
        return found, found.detach()

    @torch.no_grad()
    def _law(self, states: Tensor, *, own: bool) -> Float[Tensor, "m V"]:
        """Return the rows of the model's own states, or of the target's."""
        (target,) = self.target
        logits = self.reader.logits(states) if own or target is None else target.output(states)
        return logits.softmax(-1)


def drawn_states(
    guesses: Int[Tensor, "b B m n"], answers: Int[Tensor, "b B n"]
) -> tuple[Int[Tensor, "b B n"], Shaped[Tensor, "b B n"]]:
    """Draw a state of each block's trajectory, of those that are not its end; tell which places are at or behind f.

    A block all of whose states are its end has no such place.
    """
    differ = guesses != answers.unsqueeze(2)
    states = differ.any(-1).sum(-1)
    drawn = (torch.rand(states.shape, device=states.device) * states).long()
    place = drawn[..., None, None].expand(*guesses.shape[:2], 1, guesses.shape[-1])
    return guesses.gather(2, place).squeeze(2), differ.gather(2, place).squeeze(2).cumsum(-1) > 0
