"""The tables: a line for every scheme, rule, tree policy and drafter, in the order in which they are listed to users.

Command line, `conformance`, `polydraft limits`, the tests of exactness and of the contracts take their members from
here. A new rule is a file in `verifiers/nodes` or `verifiers/trees` and a line here; most need a word and a class only.
Read a table as `tables.RULES` when you need it, and keep no copy. Nothing is imported here: what a line names is loaded
when it is asked for.
"""

from polydraft.catalogue.lines import DrafterLine, LimitsEntry, PolicyLine, RuleLine, SchemeLine

_IID = SchemeLine("iid", "polydraft.schemes.iid:IID")
_WITHOUT = SchemeLine("without-replacement", "polydraft.schemes.without_replacement:WithoutReplacement")
_POISSON = SchemeLine("conditional-poisson", "polydraft.schemes.iid:ConditionalPoisson")
_TOP_THEN_SAMPLE = SchemeLine("top-then-sample", "polydraft.schemes.top:TopThenSample")
_SPEC_HUB = SchemeLine("spec-hub", "polydraft.schemes.top:SpecHub", own_name="spechub")
_TOP_THEN_IID = SchemeLine("top-then-iid", "polydraft.schemes.top:TopThenIID", (1,), "top 1 then iid")
_PRODUCT = SchemeLine("product", "polydraft.schemes.iid:Product")
_TOP_K = SchemeLine("top-k", "polydraft.schemes.top:TopK", own_name="top-k")
_COUPLED = SchemeLine("coupled", "polydraft.schemes.without_replacement:Coupled")
_GIVEN = SchemeLine("given", "polydraft.schemes.top:Given")

SCHEMES: tuple[SchemeLine, ...] = (
    _IID,
    _WITHOUT,
    _POISSON,
    _TOP_THEN_SAMPLE,
    _SPEC_HUB,
    _TOP_THEN_IID,
    _PRODUCT,
    _TOP_K,
    _COUPLED,
    _GIVEN,
)

_DRAWN = (_IID, _WITHOUT, _POISSON, _TOP_THEN_SAMPLE, _SPEC_HUB, _PRODUCT)
_INDEPENDENT = (_IID, _TOP_THEN_SAMPLE, _SPEC_HUB, _TOP_THEN_IID, _PRODUCT, _TOP_K, _GIVEN)
_LISTED = (_IID, _WITHOUT, _POISSON, _TOP_THEN_SAMPLE, _SPEC_HUB, _TOP_THEN_IID, _TOP_K, _GIVEN)

_NODES, _TREES = "polydraft.verifiers.nodes", "polydraft.verifiers.trees"
_TEXT, _SEVERAL = "polydraft.drafters.text", "polydraft.drafters.several"
_READERS = "polydraft.catalogue.policies"

RULES: tuple[RuleLine, ...] = (
    RuleLine(
        "naive",
        f"{_NODES}.naive:NaiveMatch",
        SCHEMES,
        measured=LimitsEntry(nodes=(_IID, _WITHOUT, _TOP_K), short="naive", chains="top-down naive"),
        own_name="naive match",
    ),
    RuleLine(
        "speculative",
        f"{_NODES}.speculative:SpeculativeSampling",
        measured=LimitsEntry(nodes=(), trees=(), chains="token by token"),
        own_name="speculative sampling",
    ),
    RuleLine(
        "block",
        f"{_TREES}.block_verification:BlockVerification",
        _DRAWN,
        measured=LimitsEntry(trees=(), chains="block verification"),
        own_name="block verification",
    ),
    RuleLine(
        "recursive",
        f"{_NODES}.speculative:RecursiveRejection",
        (_IID, _PRODUCT),
        measured=LimitsEntry(short="recursive"),
        own_name="recursive rejection",
    ),
    RuleLine(
        "recursive-wo",
        f"{_NODES}.recursive_without_replacement:RecursiveRejectionWithoutReplacement",
        measured=LimitsEntry("recursive rejection", short="recursive"),
        own_name="recursive rejection without replacement",
    ),
    RuleLine(
        "traversal",
        f"{_TREES}.traversal:TraversalVerification",
        (_IID, _WITHOUT),
        on_trees=(_IID,),
        measured=LimitsEntry("traversal", trees=(_IID, _WITHOUT)),
        own_name="traversal verification",
    ),
    RuleLine(
        "top-then-sample",
        f"{_NODES}.top_then_sample:TopThenSampleRule",
        measured=LimitsEntry(short="own rule", bottom_up=(_TOP_THEN_SAMPLE,)),
    ),
    RuleLine("k-seq", f"{_NODES}.k_seq:KSeq", measured=LimitsEntry(trees=()), own_name="k-seq"),
    RuleLine("spec-hub", f"{_NODES}.spec_hub_rule:SpecHubRule", measured=LimitsEntry(trees=()), own_name="spechub"),
    RuleLine(
        "importance-weighted",
        f"{_NODES}.importance_weighted:ImportanceWeighted",
        (_IID, _PRODUCT),
        others=({"free": None, "alphabet": None},),
        measured=LimitsEntry(trees=()),
    ),
    RuleLine(
        "race",
        f"{_NODES}.race:Race",
        _INDEPENDENT,
        on_trees=(_TOP_THEN_SAMPLE,),
        measured=LimitsEntry(nodes=(_IID, _TOP_THEN_IID), trees=()),
    ),
    RuleLine(
        "optimal",
        f"{_NODES}.optimal:Optimal",
        _LISTED,
        on_trees=(_IID,),
        measured=LimitsEntry(
            "optimal rule",
            nodes=(_IID, _WITHOUT, _POISSON, _TOP_THEN_SAMPLE, _TOP_THEN_IID),
            short="optimal",
            trees=(_IID, _WITHOUT),
            bottom_up=(_IID, _WITHOUT, _TOP_THEN_SAMPLE),
        ),
    ),
    RuleLine(
        "valued",
        f"{_TREES}.valued:Valued",
        (_WITHOUT, _IID, _TOP_THEN_IID, _TOP_THEN_SAMPLE, _TOP_K, _GIVEN, _PRODUCT),
        on_trees=(_IID, _TOP_THEN_SAMPLE),
        measured=LimitsEntry("by value", trees=(_IID, _WITHOUT)),
    ),
    RuleLine(
        "by-shape",
        f"{_TREES}.block_verification:ByShape",
        measured=LimitsEntry(trees=()),
        own_name="block verification on chains, top then sample on trees",
    ),
    RuleLine("shared-noise", f"{_TREES}.shared_noise:SharedNoise", SCHEMES, on_trees=(_GIVEN,)),
    RuleLine("typical", f"{_NODES}.lossy:TypicalAcceptance", SCHEMES, own_name="typical acceptance", lossless=False),
    RuleLine("lenient", f"{_NODES}.lossy:Lenient", lossless=False),
    RuleLine("top-beta", f"{_NODES}.lossy:TopBeta", SCHEMES, own_name="top-beta", lossless=False),
    RuleLine(
        "rollback",
        f"{_TREES}.rollback:Rollback",
        (_TOP_K, _GIVEN),
        own_name="rollback:3",
        lossless=False,
        number="threshold",
    ),
)

POLICIES: tuple[PolicyLine, ...] = (
    PolicyLine("", f"{_READERS}:widths", ("4,2,2,1",), "{widths}"),
    PolicyLine("chain", f"{_READERS}:chain", ("chain:5",), "chain:{length}"),
    PolicyLine("trunk", f"{_READERS}:trunk", ("trunk:2+3,2",), "trunk:{trunk}+{widths}"),
    PolicyLine("eagle", f"{_READERS}:eagle", ("eagle",)),
    PolicyLine("medusa", f"{_READERS}:medusa", ("medusa",)),
    PolicyLine("falcon", f"{_READERS}:falcon", ("falcon",)),
    PolicyLine(
        "best-first",
        f"{_READERS}:best_first",
        ("best-first:16", "best-first:16x4:3"),
        "best-first:{drafts}x{depth}:{children}",
        grows=True,
    ),
    PolicyLine(
        "expected",
        f"{_READERS}:expected",
        ("expected:8", "expected:12x5:2"),
        "expected:{drafts}x{depth}:{children}",
        grows=True,
    ),
    PolicyLine(
        "eagle-2", f"{_READERS}:eagle_2", ("eagle-2", "eagle-2:10x6:25"), "eagle-2:{width}x{depth}:{drafts}", grows=True
    ),
    PolicyLine(
        "confident",
        f"{_READERS}:confident",
        ("confident:8:0.4", "confident:3,2,1:0.4"),
        "confident:{widths}:{threshold}",
        grows=True,
    ),
    PolicyLine(
        "confident-path",
        f"{_READERS}:confident_path",
        ("confident-path:8:0.1",),
        "confident-path:{widths}:{threshold}",
        grows=True,
    ),
    PolicyLine(
        "confident-entropy",
        f"{_READERS}:confident_entropy",
        ("confident-entropy:8:0.4",),
        "confident-entropy:{widths}:{threshold}",
        grows=True,
    ),
    PolicyLine("disco", f"{_READERS}:disco", ("disco:8", "disco:8:0.5"), "disco:{widths}:{threshold}", grows=True),
    PolicyLine(
        "adaptive",
        f"{_READERS}:adaptive",
        ("adaptive:8", "adaptive:8:0.6"),
        "adaptive:{length}:{threshold}",
        grows=True,
    ),
)

DRAFTERS: tuple[DrafterLine, ...] = (
    DrafterLine("model", "polydraft.drafters.model:ModelDrafter", models=1),
    DrafterLine("ngram", f"{_TEXT}.ngram:NgramDrafter", bound=_GIVEN, numbers=("matches",), numbers_for_example="3"),
    DrafterLine("suffix", f"{_TEXT}.suffix:SuffixDrafter", bound=_GIVEN, store="may"),
    DrafterLine("rest", f"{_TEXT}.suffix:RetrievalDrafter", bound=_GIVEN, store="must"),
    DrafterLine("lookup-first", f"{_SEVERAL}.route:LookupFirst", models=1, wraps=True),
    DrafterLine("recycling", f"{_TEXT}.recycling:RecyclingDrafter", bound=_GIVEN),
    DrafterLine("route", f"{_SEVERAL}.hedge:route", bound=_GIVEN, gives="RoutedDrafter"),
    DrafterLine("route-first", f"{_SEVERAL}.hedge:route_first", models=1, wraps=True, gives="RoutedDrafter"),
    DrafterLine("merge", f"{_SEVERAL}.merge:merge", bound=_GIVEN, gives="MergedDrafter"),
    DrafterLine("merge-beside", f"{_SEVERAL}.merge:merge_beside", models=1, wraps=True, gives="MergedDrafter"),
    DrafterLine("jacobi", f"{_TEXT}.jacobi:JacobiDrafter", bound=_GIVEN),
    DrafterLine(
        "lookahead",
        f"{_TEXT}.lookahead:LookaheadDrafter",
        bound=_GIVEN,
        numbers=("level", "window", "guesses"),
        numbers_for_example="5,7,7",
    ),
    DrafterLine("ouroboros", f"{_TEXT}.ouroboros:OuroborosDrafter", models=1, bound=_GIVEN, wraps=True),
    DrafterLine("ensemble", "polydraft.drafters.ensemble:EnsembleDrafter", models=2, bound=_PRODUCT),
    DrafterLine("none", "polydraft.drafters.model:NoDraft", proposes=False),
)
