"""The tables: a line for every scheme, rule, tree policy and drafter, in the order in which they are listed to users.

Command line, `conformance`, `polydraft limits`, the tests of exactness and of the contracts take their members from
here. A new rule is a file in `verifiers/nodes` or `verifiers/trees` and a line here; most need a word and a class only.
Read a table as `tables.RULES` when you need it, and keep no copy.
"""

from polydraft.catalogue.lines import DrafterLine, Measured, PolicyLine, RuleLine, SchemeLine
from polydraft.catalogue.policies import (
    adaptive,
    budget,
    chain,
    confident,
    disco,
    eagle_2,
    published,
    trunk,
    widths,
)
from polydraft.drafters import (
    EnsembleDrafter,
    JacobiDrafter,
    LookaheadDrafter,
    LookupFirst,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    RecyclingDrafter,
    RetrievalDrafter,
    SuffixDrafter,
    merge,
    merge_beside,
    route,
    route_first,
)
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import (
    EAGLE_25,
    MEDUSA_63,
    BestFirst,
    EntropyBound,
    ExpectedAcceptance,
    Fixed,
    PathProbability,
    TokenProbability,
)
from polydraft.verifiers import (
    BlockVerification,
    ByShape,
    ImportanceWeighted,
    KSeq,
    Lenient,
    NaiveMatch,
    Optimal,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    SpecHubRule,
    SpeculativeSampling,
    TopBeta,
    TopThenSampleRule,
    TraversalVerification,
    TypicalAcceptance,
)

SCHEMES: tuple[SchemeLine, ...] = (
    SchemeLine("iid", IID()),
    SchemeLine("without-replacement", WithoutReplacement()),
    SchemeLine("conditional-poisson", ConditionalPoisson()),
    SchemeLine("top-then-sample", TopThenSample()),
    SchemeLine("spec-hub", SpecHub()),
    SchemeLine("top-then-iid", TopThenIID(1)),
    SchemeLine("product", Product()),
    SchemeLine("top-k", TopK()),
    SchemeLine("coupled", Coupled()),
    SchemeLine("given", Given()),
)

_EVERY = tuple(line.scheme for line in SCHEMES)
_DRAWN = (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample(), SpecHub(), Product())
_INDEPENDENT = (IID(), TopThenSample(), SpecHub(), TopThenIID(1), Product(), TopK(), Given())
_LISTED = (
    IID(),
    WithoutReplacement(),
    ConditionalPoisson(),
    TopThenSample(),
    SpecHub(),
    TopThenIID(1),
    TopK(),
    Given(),
)

RULES: tuple[RuleLine, ...] = (
    RuleLine(
        "naive",
        NaiveMatch,
        _EVERY,
        measured=Measured(nodes=(IID(), WithoutReplacement(), TopK()), short="naive", chains="top-down naive"),
    ),
    RuleLine("speculative", SpeculativeSampling, measured=Measured(nodes=(), trees=(), chains="token by token")),
    RuleLine("block", BlockVerification, _DRAWN, measured=Measured(trees=(), chains="block verification")),
    RuleLine("recursive", RecursiveRejection, (IID(), Product()), measured=Measured(short="recursive")),
    RuleLine(
        "recursive-wo",
        RecursiveRejectionWithoutReplacement,
        measured=Measured("recursive rejection", short="recursive"),
    ),
    RuleLine(
        "traversal",
        TraversalVerification,
        (IID(), WithoutReplacement()),
        on_trees=(IID(),),
        measured=Measured("traversal", trees=(IID(), WithoutReplacement())),
    ),
    RuleLine("top-then-sample", TopThenSampleRule, measured=Measured(short="own rule", bottom_up=(TopThenSample(),))),
    RuleLine("k-seq", KSeq, measured=Measured(trees=())),
    RuleLine("spec-hub", SpecHubRule, measured=Measured(trees=())),
    RuleLine(
        "importance-weighted",
        ImportanceWeighted,
        (IID(), Product()),
        variants=(ImportanceWeighted(free=None, alphabet=None),),
        measured=Measured(trees=()),
    ),
    RuleLine(
        "race",
        Race,
        _INDEPENDENT,
        on_trees=(TopThenSample(),),
        measured=Measured(nodes=(IID(), TopThenIID(1)), trees=()),
    ),
    RuleLine(
        "optimal",
        Optimal,
        _LISTED,
        on_trees=(IID(),),
        measured=Measured(
            "optimal rule",
            nodes=(IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample(), TopThenIID(1)),
            short="optimal",
            trees=(IID(), WithoutReplacement()),
            bottom_up=(IID(), WithoutReplacement(), TopThenSample()),
        ),
    ),
    RuleLine("by-shape", ByShape, measured=Measured(trees=())),
    RuleLine("shared-noise", SharedNoise, _EVERY, on_trees=(Given(),)),
    RuleLine("typical", TypicalAcceptance, _EVERY),
    RuleLine("lenient", Lenient),
    RuleLine("top-beta", TopBeta, _EVERY),
)

POLICIES: tuple[PolicyLine, ...] = (
    PolicyLine("", widths, ("4,2,2,1",), "{widths}"),
    PolicyLine("chain", chain, ("chain:5",), "chain:{length}"),
    PolicyLine("trunk", trunk, ("trunk:2+3,2",), "trunk:{trunk}+{widths}"),
    PolicyLine("eagle", published(Fixed(EAGLE_25)), ("eagle",)),
    PolicyLine("medusa", published(Fixed(MEDUSA_63)), ("medusa",)),
    PolicyLine(
        "best-first",
        budget(BestFirst),
        ("best-first:16", "best-first:16x4:3"),
        "best-first:{drafts}x{depth}:{children}",
    ),
    PolicyLine(
        "expected",
        budget(ExpectedAcceptance),
        ("expected:8", "expected:12x5:2"),
        "expected:{drafts}x{depth}:{children}",
    ),
    PolicyLine("eagle-2", eagle_2, ("eagle-2", "eagle-2:10x6:25"), "eagle-2:{width}x{depth}:{drafts}"),
    PolicyLine(
        "confident",
        confident(TokenProbability()),
        ("confident:8:0.4", "confident:3,2,1:0.4"),
        "confident:{widths}:{threshold}",
    ),
    PolicyLine(
        "confident-path", confident(PathProbability()), ("confident-path:8:0.1",), "confident-path:{widths}:{threshold}"
    ),
    PolicyLine(
        "confident-entropy",
        confident(EntropyBound()),
        ("confident-entropy:8:0.4",),
        "confident-entropy:{widths}:{threshold}",
    ),
    PolicyLine("disco", disco, ("disco:8", "disco:8:0.5"), "disco:{widths}:{threshold}"),
    PolicyLine("adaptive", adaptive, ("adaptive:8", "adaptive:8:0.6"), "adaptive:{length}:{threshold}"),
)

DRAFTERS: tuple[DrafterLine, ...] = (
    DrafterLine("model", ModelDrafter, models=1),
    DrafterLine("ngram", NgramDrafter, scheme=Given(), numbers=("matches",), numbers_for_example="3"),
    DrafterLine("suffix", SuffixDrafter, scheme=Given(), store="may"),
    DrafterLine("rest", RetrievalDrafter, scheme=Given(), store="must"),
    DrafterLine("lookup-first", LookupFirst, models=1, wraps=True),
    DrafterLine("recycling", RecyclingDrafter, scheme=Given()),
    DrafterLine("route", route, scheme=Given()),
    DrafterLine("route-first", route_first, models=1, wraps=True),
    DrafterLine("merge", merge, scheme=Given()),
    DrafterLine("merge-beside", merge_beside, models=1, wraps=True),
    DrafterLine("jacobi", JacobiDrafter, scheme=Given()),
    DrafterLine(
        "lookahead",
        LookaheadDrafter,
        scheme=Given(),
        numbers=("level", "window", "guesses"),
        numbers_for_example="5,7,7",
    ),
    DrafterLine("ouroboros", OuroborosDrafter, models=1, scheme=Given(), wraps=True),
    DrafterLine("ensemble", EnsembleDrafter, models=2, scheme=Product()),
    DrafterLine("none", NoDraft, proposes=False),
)
