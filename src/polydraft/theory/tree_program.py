"""The most drafts that any exact rule can keep of a tree on average: a linear program over all trees, for toy rows."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, NotConverged, VocabularyMismatch
from polydraft.schemes import Scheme, enumerate_drafts, require_independent
from polydraft.theory.transport import SOLVER, SPARSE

Text = tuple[int, ...]
"""The tokens from below the root to a node."""
Tokens = frozenset[Text]
"""The texts of all nodes of a drawn tree; copies of a text are one."""
Flow = tuple[Tokens, Text]
"""The texts of the drafts that are known, and one of them, through which the path may run."""
Subtree = tuple[Any, ...]
"""The shape below a node: the subtrees below its children, in drafting order."""
Rows = Sequence[Float[Tensor, "..."]]
"""The rows after 0, 1, 2, ... drafts: entry d has d axes for the drafts before it, then those of a row."""
MOST_TREES = 20_000
OPTIONS = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


def subtrees(counts: Sequence[Sequence[int]]) -> Subtree:
    """Return the shape below the root of a tree whose levels have these numbers of children, as in `TreeShape`."""
    below: list[Subtree] = []
    for level in reversed([*counts]):
        nodes = iter(below + [()] * max(0, sum(level) - len(below)))
        below = [tuple(next(nodes) for _ in range(count)) for count in level]
    return below[0] if below else ()


def drawn_trees(scheme: Scheme, counts: Sequence[Sequence[int]], draft_rows: Rows) -> dict[Tokens, float]:
    """Return the probability of every set of texts that a drawn tree can have; for small vocabularies only.

    Raises:
        InvalidParameter: there are too many to list, or too few rows.
        UnpairedScheme: drafts of one node depend on those of another.
    """
    require_independent(scheme, "Listing trees")
    if len(draft_rows) < len(counts):
        raise InvalidParameter(
            f"A tree of {len(counts)} levels needs as many draft rows, but there are {len(draft_rows)}."
        )
    known: dict[tuple[Text, Subtree], dict[Tokens, float]] = {}

    def below(text: Text, shape: Subtree) -> dict[Tokens, float]:
        if not shape:
            return {frozenset(): 1.0}
        if (text, shape) in known:
            return known[text, shape]
        found: dict[Tokens, float] = defaultdict(float)
        drafts, chances = enumerate_drafts(scheme, draft_rows[len(text)][text].double(), len(shape))
        for atoms, chance in zip(drafts, map(float, chances), strict=True):
            drawn = zip(map(int, atoms), shape, strict=True)
            here: list[tuple[Text, Subtree]] = [((*text, token), child) for token, child in drawn if token >= 0]
            for parts in product(*(below(*child).items() for child in here)):
                whole = frozenset(child for child, _ in here).union(*(texts for texts, _ in parts))
                found[whole] += chance * prod(share for _, share in parts)
            if len(found) > MOST_TREES:
                raise InvalidParameter(f"There are over {MOST_TREES} trees to list; take fewer tokens or fewer nodes.")
        return known.setdefault((text, shape), found)

    return below((), subtrees(counts))


class _Limits(NamedTuple):
    """Rows of a program: sum of value * variable over the entries of a row is at most its bound."""

    rows: list[int]
    columns: list[int]
    values: list[float]
    bounds: list[float]

    def add(self, bound: float, terms: Sequence[tuple[int, float]]) -> None:
        self.rows.extend([len(self.bounds)] * len(terms))
        self.columns.extend(column for column, _ in terms)
        self.values.extend(value for _, value in terms)
        self.bounds.append(bound)


def tree_optimum(scheme: Scheme, counts: Sequence[Sequence[int]], target_rows: Rows, draft_rows: Rows) -> float:
    """Return the most drafts that an exact rule can keep of a drawn tree, on average over the trees.

    Let A(y) be the probability that the kept path runs through the text y, A(root) = 1. What the rule emits behind y,
    and does not keep, has the probability A(y) target(c | y) - A(yc) for the token c if the text is to follow the
    target. So a rule with these A is exact for some choice of what is emitted iff

        A(yc) <= A(y) target(c | y)    for all y and c,

    and the mean number of kept drafts is the sum of A over all texts but the root. With a_y(T) the probability that the
    tree T is drawn and the path runs through y, the program is

        maximise sum a_y(T),   a_root(T) = Pr[T],   sum_c a_yc(T) <= a_y(T),   A = sum_T a(T) as above.

    Trees with the same texts are one, copies of a text included: of two equal siblings that both have children, either
    can be kept, so what the rule may do is the same for their union.

    A rule is bounded by it if what follows its step is the target's, as in `TreeVerifier`. A rule that changes the
    target of the next step (greedy block verification, arXiv 2403.10444, appendix) may keep more now, and pays later.

    On a chain block verification reaches the program, on one level the optimal transport (`lp_acceptance`).

    What is solved is smaller. With a_y(P) the sum of a_y(T) over the trees T that begin with the drafts P down to the
    level of y,

        sum_{y of one level} a_y(P) <= Pr[P],   sum_c sum_{P' below P} a_yc(P') <= a_y(P),   A = sum_P a(P) as above,

    follows from the program, and its optimum is the same: whatever a_y(P) are, a rule that goes down the tree level by
    level, and takes what drafts of a new level get from all paths that end above in proportion, has them (`Valued`). So
    nothing is lost by deciding where the path stands at a level before deeper drafts are looked at.

    Args:
        scheme: how the drafts are drawn.
        counts: the shape of the trees, as in `TreeShape`.
        target_rows: entry d "V ... V" has d + 1 axes; the last is the token that follows d drafts.
        draft_rows: the same for the drafts, with one axis more before the last for `Product`.

    Raises:
        InvalidParameter: there are too many trees to list, or too few rows.
        NotConverged: the solver stopped before the optimum.
        UnpairedScheme: drafts of one node depend on those of another.
        VocabularyMismatch: rows of target and draft differ in length.
    """
    for target, draft in zip(target_rows, draft_rows, strict=False):
        if target.shape[-1] != draft.shape[-1]:
            raise VocabularyMismatch(
                f"The target rows have {target.shape[-1]} tokens and the draft rows {draft.shape[-1]}; take one "
                "vocabulary for both."
            )
    if len(target_rows) < len(counts):
        raise InvalidParameter(
            f"A tree of {len(counts)} levels needs as many target rows, but there are {len(target_rows)}."
        )
    trees = drawn_trees(scheme, counts, draft_rows)
    flows: dict[Flow, int] = {}
    limits = _limits(trees, flows)
    _bound_texts(limits, flows, target_rows)
    return -_solved(limits, len(flows)) if flows else 0.0


def _limits(trees: Mapping[Tokens, float], flows: dict[Flow, int]) -> _Limits:
    """Bound the flows by the chances of the drafts down to their level; each flow gets its number."""
    limits, tops = _Limits([], [], [], []), dict[Tokens, float](trees)
    for depth in range(max((len(text) for tree in trees for text in tree), default=0), 0, -1):
        above: dict[Tokens, float] = defaultdict(float)
        below: dict[Flow, list[int]] = defaultdict(list)
        for top, chance in tops.items():
            short = frozenset(text for text in top if len(text) < depth)
            above[short] += chance
            here = sorted(text for text in top if len(text) == depth)
            for text in here:
                below[short, text[:-1]].append(flows.setdefault((top, text), len(flows)))
            limits.add(chance, [(flows[top, text], 1.0) for text in here])
        for flow, columns in below.items() if depth > 1 else ():
            own = flows.setdefault(flow, len(flows))
            limits.add(0.0, [*((column, 1.0) for column in columns), (own, -1.0)])
        tops = above
    return limits


def _bound_texts(limits: _Limits, flows: Mapping[Flow, int], target_rows: Rows) -> None:
    """Bound the flows through each text by those through the text before it."""
    through: dict[Text, list[int]] = defaultdict(list)
    for (_, text), column in flows.items():
        through[text].append(column)
    for text, columns in through.items():
        share = float(target_rows[len(text) - 1][text])
        above = [(column, -share) for column in through[text[:-1]]] if text[:-1] else []
        limits.add(0.0 if above else share, [*((column, 1.0) for column in columns), *above])


def _solved(limits: _Limits, variables: int) -> float:
    matrix = SPARSE((limits.values, (limits.rows, limits.columns)), shape=(len(limits.bounds), variables)).tocsr()
    solution = SOLVER([-1.0] * variables, matrix, limits.bounds, method="highs", options=OPTIONS)
    if solution.status != 0:
        raise NotConverged(f"The program of trees with {variables} flows was not solved ({solution.message}).")
    return float(solution.fun)
