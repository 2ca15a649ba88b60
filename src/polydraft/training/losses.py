"""Losses for training a draft model: next-token cross-entropy, and distances to the target's distribution."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


def next_token_loss(logits: Float[Tensor, "b t V"], ids: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy, in nats, of each token given those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return the mean Kullback-Leibler divergence of the draft's rows from the target's, in nats.

    KL(target || draft) = sum_x target(x) log(target(x) / draft(x)) at every position (DistillSpec,
    arXiv 2310.08461, section 4: forward KL).
    """
    draft = functional.log_softmax(draft_logits.float(), dim=-1).flatten(0, 1)
    target = functional.log_softmax(target_logits.float(), dim=-1).flatten(0, 1)
    return functional.kl_div(draft, target, reduction="batchmean", log_target=True)


def overlap_loss(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return the mean of -log sum_x min(target(x), draft(x)): the acceptance rate of a single draft, directly.

    The sum is one minus the total variation distance and equals the acceptance probability of speculative
    sampling (arXiv 2211.17192, theorem 3.5); its logarithm keeps the gradient alive where the overlap is small.
    """
    draft = torch.softmax(draft_logits.float(), dim=-1)
    target = torch.softmax(target_logits.float(), dim=-1)
    return -torch.minimum(draft, target).sum(dim=-1).clamp_min(1e-6).log().mean()


def draft_distance(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return what the embedded draft is distilled by: KL(target || draft) plus -log of their overlap."""
    return distillation_loss(draft_logits, target_logits) + overlap_loss(draft_logits, target_logits)
