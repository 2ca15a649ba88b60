"""Which rules are measured, and how: lines of the catalogue, with every scheme that a draft model draws by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polydraft.catalogue import RuleLine, every_scheme, parse_policy, tables
from polydraft.drafters import Drafter
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import SamplingParams
from polydraft.schemes import Scheme
from polydraft.verifiers import BottomUp, NodeVerifier, ScalableVerifier, TopDown, TreeVerifier

DEFAULT = "default"
"""The word for the tree that the engine takes where none is named."""
Rule = NodeVerifier | TreeVerifier


@dataclass(frozen=True)
class RulesSettings:
    """How rules are measured.

    Args:
        temperatures: of the target and of the draft model.
        drafts: numbers of drafts at a node; a rule that takes fewer is measured with as many as it takes.
        trees: the trees of the shares: as `parse_policy` reads them, or "default".
        max_tokens: how many tokens are generated per prompt and temperature.
        shortlist: how many of the draft model's likeliest tokens drafts are drawn from, at single nodes.
        vocabulary: the tokens of the rows over which the optimum is timed.
        nodes: the nodes of a batch whose laws are computed at once.
        repeats: how often the optimum is timed.
        seed: fixes the texts and the drafts.

    Raises:
        InvalidParameter: a value outside its range.
    """

    temperatures: tuple[float, ...] = (1.0,)
    drafts: tuple[int, ...] = (2, 4)
    trees: tuple[str, ...] = ("3,2", DEFAULT)
    max_tokens: int = 64
    shortlist: int = 64
    vocabulary: int = 152_000
    nodes: int = 64
    repeats: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        least = {"max_tokens": 1, "shortlist": 2, "vocabulary": 2, "nodes": 1, "repeats": 1, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InvalidParameter(f"{name} must be an integer >= {bound}, but is {getattr(self, name)}.")
        if not all(1 <= k <= min(self.shortlist, self.vocabulary) for k in self.drafts):
            raise InvalidParameter(f"Numbers of drafts must lie between 1 and shortlist, {self.shortlist}.")
        for name in ("temperatures", "drafts", "trees"):
            values = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise InvalidParameter(f"{name} must be different values, at least one, but are {values}.")
        for tree in self.trees:
            if tree != DEFAULT:
                parse_policy(tree)


def node_rules_for(drafter: Drafter, words: Sequence[str] = (), schemes: Sequence[Scheme] = ()) -> list[NodeVerifier]:
    """Return node rules with every scheme that they know and the drafter draws by, those of a scheme together.

    Schemes whose nodes are not independent are left out: a law at one node does not tell how they are drawn.

    Args:
        drafter: who drafts.
        words: the words of the rules; none for all that are lossless.
        schemes: the schemes; none for all.
    """
    made = _made(drafter, words, schemes, lambda line: line.known if line.decides_at_nodes else ())
    return [rule for rule in made if isinstance(rule, NodeVerifier) and rule.scheme.independent]


def tree_rules_for(
    drafter: Drafter, words: Sequence[str] = (), schemes: Sequence[Scheme] = (), *, bottom_up: bool = False
) -> list[TreeVerifier]:
    """Return rules as they verify trees: node rules with every scheme, lifted, and rules for whole trees.

    Rules for whole trees have their usual scheme and those of `RuleLine.on_trees`; or all that are asked for.

    Args:
        drafter: who drafts.
        words: the words of the rules; none for all that are lossless.
        schemes: the schemes; none for all.
        bottom_up: lift node rules by `BottomUp`, those that it lifts; else by `TopDown`.
    """

    def known(line: RuleLine) -> Sequence[Scheme]:
        return line.known if line.decides_at_nodes or schemes else line.proved_on_trees

    lifted = [_lifted(rule, bottom_up) for rule in _made(drafter, words, schemes, known)]
    return [rule for rule in lifted if rule is not None]


def _lifted(rule: Rule, bottom_up: bool) -> TreeVerifier | None:
    if not isinstance(rule, NodeVerifier):
        return rule
    if not bottom_up:
        return TopDown(rule)
    return BottomUp(rule) if isinstance(rule, ScalableVerifier) and rule.scheme.independent else None


def _made(
    drafter: Drafter, words: Sequence[str], schemes: Sequence[Scheme], known: Callable[[RuleLine], Sequence[Scheme]]
) -> list[Rule]:
    named = [line.numbered(word) for line in tables.RULES for word in words if line.is_named(word)]
    lines = named if words else [line for line in tables.RULES if line.lossless]
    wanted = [scheme for scheme in every_scheme() if (not schemes or scheme in schemes) and _draws(drafter, scheme)]
    return [line.of(scheme) for scheme in wanted for line in lines if scheme in known(line)]


def _draws(drafter: Drafter, scheme: Scheme) -> bool:
    """Tell whether a drafter draws by a scheme; tokens from outside, for one, come from no draft model."""
    try:
        drafter.check(scheme)
    except UnpairedScheme:
        return False
    return True
