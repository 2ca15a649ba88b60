"""From a drafter's logits to draft rows: how many tokens are listed, and with which probabilities."""

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, InvalidProbabilities
from polydraft.probs import SamplingParams, shortlist, usable, whole_row
from polydraft.schemes import Scheme
from polydraft.trees import GrowingPolicy, TreePolicy

LISTED = 256
"""How many tokens nodes with several drafts draw from."""
MOST_WHOLE = 1 << 15
"""Rows of larger vocabularies are always cut: what whole ones cost and bring there has not been measured."""


def check_listed(size: int | None) -> None:
    """Check the length of shortlists that a user asks for.

    Raises:
        InvalidParameter: a shortlist without a token.
    """
    if size is not None and size < 1:
        raise InvalidParameter(f"shortlist_size must be at least 1, or None, but is {size}.")


def listed(asked: int | None, scheme: Scheme, policy: TreePolicy, vocab_size: int) -> int | None:
    """Return how many tokens of each row are drawn from; None for all.

    Args:
        asked: what the user asked for; None for `LISTED`, or for all tokens in chains of sampled drafts, where listing
            costs more than it spares, up to `MOST_WHOLE` of them.
        scheme: how drafts are drawn; certain ones need no more tokens than a node has children.
        policy: the trees.
        vocab_size: the target's number of tokens.
    """
    size = LISTED if asked is None else asked
    children = policy.shape.max_children
    if isinstance(policy, GrowingPolicy):
        return size
    if scheme.deterministic and not policy.stops:  # who stops looks at chances
        return min(size, max(children, 1))
    return None if asked is None and children == 1 and vocab_size <= MOST_WHOLE else size


def draft_rows(
    logits: Float[Tensor, "b f V"], params: SamplingParams, size: int | None, scheme: Scheme
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
    """Return the shortlists of nodes and their draft probabilities, as `grow` takes them.

    A row that is no law becomes one of zeros, below which nothing is drafted; so one text of a batch may lose its
    drafts, and the others keep theirs.

    Args:
        logits: the drafter's.
        params: its sampling settings.
        size: tokens listed; None for all.
        scheme: under `Product` a node's only row is one of several.
    """
    tokens, probs = _usable_rows(logits, params, size)
    return tokens, probs.unsqueeze(-2) if scheme.several_rows else probs


def _usable_rows(
    logits: Float[Tensor, "b f V"], params: SamplingParams, size: int | None
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
    if logits.device.type == "cpu":  # another device would have to be waited for
        try:
            return _listed(logits, params, size, check=True)
        except InvalidProbabilities:
            pass
    logits, fine = usable(logits)
    tokens, probs = _listed(logits, params, size, check=False)
    return tokens, probs * fine.unsqueeze(-1)


def _listed(
    logits: Float[Tensor, "b f V"], params: SamplingParams, size: int | None, *, check: bool
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
    return whole_row(logits, params, check=check) if size is None else shortlist(logits, params, size, check=check)
