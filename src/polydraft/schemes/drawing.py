"""What the schemes' samplers share: exponential clocks, padding, and laws of deterministic drafts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import Scheme


def cut(drafts: Int[Tensor, "*b k"], counts: Int[Tensor, "*b"]) -> Int[Tensor, "*b k"]:
    """Keep the first `counts` drafts of each row."""
    rank = torch.arange(drafts.shape[-1], device=drafts.device)
    return drafts.where(rank < counts.unsqueeze(-1), -1)


def padded(drafts: Int[Tensor, "*b j"], k: int) -> Int[Tensor, "*b k"]:
    """Pad drafts to k places with -1."""
    missing = k - drafts.shape[-1]
    return torch.nn.functional.pad(drafts, (0, missing), value=-1) if missing else drafts


def clocks(rates: Float[Tensor, "*b K"], uniforms: Float[Tensor, "*b u"]) -> Float[Tensor, "*b K"]:
    """Return the logarithms of independent exponential clocks with the given rates; infinite where a rate is zero."""
    exponential = uniforms[..., : rates.shape[-1]].double().neg().log1p_().neg_()
    times = exponential.log_().sub_(rates.double().log())  # logarithms: a tiny rate must not overflow
    return times.where(rates > 0, torch.inf)


def last_positive(probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
    """Return the place of each row's last positive entry; -1 in a row without any."""
    places = torch.arange(probs.shape[-1], device=probs.device)
    return places.where(probs > 0, -1).amax(dim=-1)


def support_size(probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
    """Return the number of positive entries of each row."""
    return (probs > 0).sum(dim=-1)


def largest_count(counts: Int[Tensor, "*b"]) -> int:
    """Return the largest of some numbers of drafts; zero if there are none."""
    return int(counts.max()) if counts.numel() else 0


def log_symmetric_sums(logs: Float[Tensor, "*b A"], sizes: int) -> Float[Tensor, "*b s C"]:
    """Return log e_s of the first i weights for s = 0..sizes - 1 and i = 0..A, given the weights' logarithms.

    The elementary symmetric polynomial e_s is the sum over sets of s weights of their product. In logarithms, because
    products of small probabilities would vanish.
    """
    chains = [torch.nn.functional.pad(torch.zeros_like(logs), (0, 1))]
    for _ in range(1, sizes):
        sums = (logs + chains[-1][..., :-1]).logcumsumexp(dim=-1)
        chains.append(torch.nn.functional.pad(sums, (1, 0), value=-torch.inf))
    return torch.stack(chains, dim=-2)


def indicator(scheme: Scheme, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """Return one where the drafts are those of a deterministic scheme, else zero."""
    k = drafts.shape[-1]
    counts = torch.full(draft_probs.shape[:-1], k, device=draft_probs.device)
    own = scheme.sample(draft_probs, counts, draft_probs.new_zeros(*draft_probs.shape[:-1], k), k)
    return (own == drafts).all(dim=-1).to(draft_probs.dtype)
