"""Recursive rejection for drafts sampled without replacement (RSD, Sequoia)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import NotConverged
from polydraft.probs import normalised, without
from polydraft.schemes import Scheme, WithoutReplacement, require_scheme
from polydraft.verifiers.host.rejections import SCALE, average_accepted, tried_in_turn
from polydraft.verifiers.law import OutcomeLaw, accept_ratio, at_draft
from polydraft.verifiers.nodes.recursive_iid import after_rejection, shortfall
from polydraft.verifiers.selection.ordered import Numbers, Places, numbers, tensor

NEGLIGIBLE = 1e-15
"""Sequences of rejected drafts less likely than this are left out."""
EXPANDED, EVALUATED = 2**16, 2**21
"""The most sequences of one node that are followed further, and that are looked at when the last draft is tried."""
ROOM = 2**22
"""The most numbers in one tensor of the enumeration."""
ALL = 2**24
"""The most sequences, with the last draft, of which all are looked at on the host: a thirtieth of a second."""


@dataclass(frozen=True)
class RecursiveRejectionWithoutReplacement:
    """Try the drafts in drafting order, each against the residual and the row it was really drawn from.

    Problem: successive drafts x_1, ..., x_k, a target mass m of total a <= 1 and draft capacity 1: accept one draft
    so that no token is accepted more often than its mass.
    Rule: with m_1 = m and q_1 the draft row, accept x_j with probability min(1, m_j(x_j) / q_j(x_j)); after a
    rejection, which has probability 1 - b_j, m_{j+1} = (m_j - q_j)+ / (1 - b_j) is left and q_{j+1} is q_j without x_j,
    renormalised; when all are rejected emit from norm(m_{k+1}).
    Scheme: successive sampling without replacement; uses the order of the drafts.
    Exactness: given the drafts before it, x_j is a draw from q_j, so each step is speculative sampling.
    Cost: O(k K) per node for the law.
    Acceptance: 1 once the drafts cover the target's support; below the scheme's optimum otherwise. The residual
    depends on the rejected tokens R only through one number: m_{j+1} = (m - M q)+ / g(M), where g(M) = |(m - M q)+| + 1
    - a, M = 0 before the first draft and M grows by g(M) / (1 - q(R)) with each rejection. So acceptance and marginal
    are sums over the sequences of k - 1 rejected tokens with O(log K) work each: O(K^(k-1) log K), exact for k <= 4 at
    K = 64. Beyond that unlikely sequences are left out; where those left out are too likely for the tolerance there is
    no answer but `NotConverged`, after up to a few seconds a node. Of 11 nodes of the embedded pair at temperature 1 (K
    = 64), 4 had an answer for k = 5, 2 for k = 6 and none for k = 8. `BottomUp` on a CPU follows all sequences, in
    O(K^(k-1)) for three or more drafts (`average_accepted`): exact for k <= 4 at K = 256. The law is not affected, for
    any k.
    Source: arXiv 2402.14160, algorithm 2 (RSD); arXiv 2402.12374, algorithm 2 (Sequoia); the number M and the scaled
    form are our derivation.

    Args:
        tolerance: how much the sequences left out may add to an acceptance rate, which is then too small by at most
            this.

    Raises:
        UnpairedScheme: the scheme is not `WithoutReplacement`.
    """

    scheme: Scheme = WithoutReplacement()
    tolerance: float = 1e-6
    name = "recursive rejection without replacement"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (WithoutReplacement,), "Recursive rejection without replacement")

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law by running the recursion on probabilities instead of coins."""
        shares, left = _recursion(drafts, draft_probs, target_probs)
        rejected = (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0)
        return OutcomeLaw(shares, rejected * normalised(left, target_probs))

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return Pr[the drafts before x_j are rejected] min(1, m_j(x_j) / q_j(x_j)) for each draft x_j."""
        return _recursion(drafts, draft_probs, target_mass)[0]

    def marginal(
        self, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return sum_R Pr[R is rejected] min(m_R, q_R) over the sequences R of at most counts - 1 rejected tokens.

        Raises:
            NotConverged: sequences that have to be left out are likelier than min(tolerance, 1e-9).
        """
        return _enumerated(draft_probs, target_mass, counts, min(self.tolerance, 1e-9))[0]

    def at_node(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return shares and marginal of one node, on the host.

        Raises:
            NotConverged: as `marginal`, where there are more than `ALL` sequences.
        """
        count = int((drafts >= 0).sum())
        shares = tried_in_turn(drafts, draft_row, target_mass)[0]
        if int((draft_row > 0).sum()) ** (count - 1) <= ALL:
            return shares, average_accepted(draft_row, target_mass, count)
        return shares, numbers(self.marginal(tensor(draft_row), tensor(target_mass), torch.tensor(count)))

    def law_at(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts and the weights of what is emitted if all are rejected, on the host."""
        return tried_in_turn(drafts, draft_row, target_mass)

    def acceptance(
        self, draft_probs: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return 1 - sum_R Pr[R is rejected] over the sequences R of `counts` tokens.

        Raises:
            NotConverged: sequences that have to be left out are likelier than the tolerance.
        """
        return _enumerated(draft_probs, target_probs, counts, self.tolerance)[1]


def _recursion(
    drafts: Int[Tensor, "*b k"], draft_probs: Float[Tensor, "*b A"], mass: Float[Tensor, "*b A"]
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
    """Return the drafts' shares, and the mass that is left when all are rejected."""
    left, missing, law = mass, shortfall(mass), draft_probs
    reached = torch.ones_like(missing)
    shares: list[Tensor] = []
    for draft in drafts.unbind(dim=-1):
        there = draft >= 0
        accepted = accept_ratio(at_draft(left, draft), at_draft(law, draft)) * there
        shares.append(reached * accepted)
        reached = reached * (1 - accepted)
        after, missing_after, _ = after_rejection(left, missing, law)
        left, missing = torch.where(there.unsqueeze(-1), after, left), torch.where(there, missing_after, missing)
        remaining = without(law, draft.unsqueeze(-1))
        law = normalised(remaining, remaining)
    return torch.stack(shares, dim=-1), left


@dataclass(frozen=True, eq=False)
class _Rejected:
    """Sequences of rejected drafts, B for each row.

    Args:
        tokens: the rejected tokens, in order.
        weight: Pr[these are the tokens | as many are rejected].
        dose: M, the multiple of the draft row that the rejections have taken off the mass.
        left: the draft row's sum over the tokens that are not rejected, times `SCALE`.
    """

    tokens: Int[Tensor, "r B j"]
    weight: Float[Tensor, "r B"]
    dose: Float[Tensor, "r B"]
    left: Float[Tensor, "r B"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Draft and target rows, ready to evaluate g(M) = |(mass - M draft)+| + 1 - |mass| in O(log K).

    Args:
        draft: the draft rows times `SCALE`.
        mass: the target masses.
        missing: 1 - |mass|.
        ratio: mass / draft, infinite where the draft row is zero.
        descending: `ratio` in descending order.
        sums: the cumulative sums of mass and draft in this order, from zero.
    """

    draft: Float[Tensor, "r A"]
    mass: Float[Tensor, "r A"]
    missing: Float[Tensor, "r"]
    ratio: Float[Tensor, "r A"]
    descending: Float[Tensor, "r A"]
    sums: tuple[Float[Tensor, "r B"], Float[Tensor, "r B"]]

    @classmethod
    def of(cls, draft_probs: Float[Tensor, "r A"], mass: Float[Tensor, "r A"]) -> "_Rows":
        mass, draft = mass.double(), draft_probs.double() * SCALE
        ratio = torch.where(draft > 0, mass / draft.where(draft > 0, torch.ones_like(draft)), torch.inf)
        descending, order = ratio.sort(dim=-1, descending=True)
        mass_sum, draft_sum = (_from_zero(row.gather(-1, order)) for row in (mass, draft))
        return cls(draft, mass, shortfall(mass), ratio, descending, (mass_sum, draft_sum))

    def none_rejected(self) -> _Rejected:
        """Return the empty sequence of every row."""
        zero, left = torch.zeros_like(self.draft[:, :1]), self.draft.sum(dim=-1, keepdim=True)
        return _Rejected(zero[..., None][..., :0].long(), zero + 1, zero, left)

    def remaining(self, dose: Float[Tensor, "r B"]) -> Float[Tensor, "r B"]:
        """Return g at each M: the probability that everything so far is rejected."""
        place = torch.searchsorted(-self.descending, -dose)
        mass, draft = (one.gather(-1, place) for one in self.sums)
        return (mass - dose * draft).clamp_min(0) + self.missing.unsqueeze(-1)

    def accepted(self, now: _Rejected, dose: Float[Tensor, "r B"]) -> Float[Tensor, "r A"]:
        """Return what the next draft's acceptance adds to the marginal, where it raises M to `dose`.

        That is sum_R weight_R min((mass - M draft)+, (M' - M) draft) = draft sum_R weight_R ((ratio - M)+ - (ratio -
        M')+); at the tokens of R it is zero by itself.
        """
        share = _hinges(now.weight, now.dose, self.ratio) - _hinges(now.weight, dose, self.ratio)
        return torch.where(self.draft > 0, self.draft * share, 0.0).clamp_min(0)

    def extended(
        self, now: _Rejected, dose: Float[Tensor, "r B"], after: Float[Tensor, "r B"], most: int
    ) -> tuple[_Rejected, Float[Tensor, "r"]]:
        """Add one rejected token to every sequence in every way, and keep the likeliest `most` of these.

        Also return the probability of those left out.
        """
        weight = self._weights(now, dose)
        chance = (weight * after.unsqueeze(-1)).flatten(-2)
        wanted = int((chance > NEGLIGIBLE).sum(dim=-1).max())
        kept = chance.topk(min(wanted, most), dim=-1, sorted=False)
        atoms = self.draft.shape[-1]
        parent, token = kept.indices // atoms, kept.indices % atoms
        before = now.tokens.gather(1, parent.unsqueeze(-1).expand(-1, -1, now.tokens.shape[-1]))
        tokens = torch.cat([before, token.unsqueeze(-1)], dim=-1)
        left = self._left(tokens, now.left.gather(-1, parent) - self.draft.gather(-1, token))
        dropped = (chance.sum(dim=-1) - kept.values.sum(dim=-1)).clamp_min(0)
        return _Rejected(tokens, weight.flatten(-2).gather(-1, kept.indices), dose.gather(-1, parent), left), dropped

    def _weights(self, now: _Rejected, dose: Float[Tensor, "r B"]) -> Float[Tensor, "r B A"]:
        """Return the weight of every longer sequence: the rejected token is x in proportion to (q_R - m_R)+(x)."""
        mass, draft = self.mass.unsqueeze(-2), self.draft.unsqueeze(-2)
        kept = (mass - now.dose.unsqueeze(-1) * draft).clamp_min(0)
        excess = ((dose - now.dose).unsqueeze(-1) * draft - kept).clamp_min(0).scatter(-1, now.tokens, 0.0)
        return normalised(excess, excess) * now.weight.unsqueeze(-1)

    def _left(self, tokens: Int[Tensor, "r B j"], left: Float[Tensor, "r B"]) -> Float[Tensor, "r B"]:
        """Replace what subtraction has left of the draft row's sum by the sum itself where digits were lost."""
        row, place = (left < self.draft.sum(dim=-1, keepdim=True) * 2.0**-10).nonzero(as_tuple=True)
        exact = self.draft[row].scatter(-1, tokens[row, place], 0.0).sum(dim=-1)
        return left.index_put((row, place), exact)


def _from_zero(values: Float[Tensor, "r B"]) -> Float[Tensor, "r B1"]:
    return torch.nn.functional.pad(values.cumsum(dim=-1), (1, 0))


def _hinges(
    weight: Float[Tensor, "r B"], dose: Float[Tensor, "r B"], ratio: Float[Tensor, "r A"]
) -> Float[Tensor, "r A"]:
    """Return sum_b weight_b (ratio - dose_b)+ for every finite ratio."""
    dose, order = dose.sort(dim=-1)
    weight = weight.gather(-1, order)
    place = torch.searchsorted(dose, ratio)
    finite = ratio.where(ratio < torch.inf, torch.zeros_like(ratio))
    return finite * _from_zero(weight).gather(-1, place) - _from_zero(weight * dose).gather(-1, place)


def _enumerated(
    draft_probs: Float[Tensor, "*b A"], mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"], tolerance: float
) -> tuple[Float[Tensor, "*b A"], Float[Tensor, "*b"]]:
    """Return the marginal and the probability of accepting a draft, a few rows at a time."""
    atoms = mass.shape[-1]
    most = int(counts.max()) if counts.numel() else 0
    at_once = max(1, ROOM // (atoms * min(EXPANDED, atoms ** max(most - 2, 0))))
    marginal, accepted = torch.zeros_like(mass).reshape(-1, atoms), torch.zeros_like(mass[..., 0]).reshape(-1)
    flat_draft, flat_mass, flat_counts = draft_probs.reshape(-1, atoms), mass.reshape(-1, atoms), counts.reshape(-1)
    for start in range(0, len(accepted), at_once):
        here = slice(start, start + at_once)
        some = _few(_Rows.of(flat_draft[here], flat_mass[here]), flat_counts[here], tolerance)
        marginal[here], accepted[here] = (one.to(mass.dtype) for one in some)
    return marginal.reshape(mass.shape), accepted.reshape(counts.shape)


def _few(rows: _Rows, counts: Int[Tensor, "r"], tolerance: float) -> tuple[Float[Tensor, "r A"], Float[Tensor, "r"]]:
    """Do what `_enumerated` does for as many rows as fit into memory."""
    now, most = rows.none_rejected(), int(counts.max())
    marginal, rejected = torch.zeros_like(rows.mass), torch.ones_like(rows.missing)
    ended, lost = torch.zeros_like(rejected), torch.zeros_like(rejected)
    for place in range(most):
        step = rows.remaining(now.dose) / now.left.where(now.left > 0, torch.ones_like(now.left))
        dose = now.dose + step * (now.left > 0)  # without tokens left there is no further draft
        after = rows.remaining(dose)
        going = place < counts
        marginal = marginal + rows.accepted(now, dose) * going.unsqueeze(-1)
        rejected = torch.where(going, (now.weight * after).sum(dim=-1) + ended, rejected)
        if place + 1 < most:
            ended = ended + (now.weight * after * (now.left <= 0)).sum(dim=-1)
            now, dropped = rows.extended(now, dose, after, EXPANDED if place + 2 < most else EVALUATED)
            ended, lost = ended + dropped, lost + dropped * (place + 1 < counts)
            _require_little(float(lost.max()), tolerance, most)
    return marginal, (1 - rejected).clamp(0, 1)


def _require_little(lost: float, tolerance: float, k: int) -> None:
    if lost > tolerance:
        raise NotConverged(
            f"The acceptance of {k} drafts without replacement cannot be enumerated to {tolerance:.1g}: rejections of "
            f"probability {lost:.2g} are too many to follow; ask for fewer drafts, a shorter shortlist, or a tolerance "
            "above that."
        )
