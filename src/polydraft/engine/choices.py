"""What users pass for drafter, verifier and tree, as the parts that the engine takes."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Generator, nn

from polydraft.catalogue import (
    MANY,
    drafter_line,
    drafter_spellings,
    is_drafter_word,
    meant_drafter,
    names_file,
    parse_policy,
    verifier_by_name,
    word_of,
)
from polydraft.drafters import (
    MASKED,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    PredictedDrafter,
    check_target,
    drafter_of,
    drafters_in,
    drafts_under,
    model_defaults,
    owned_models,
    owned_networks,
    proposes,
    route_before,
    route_first,
)
from polydraft.engine.fitted import fitted_policy, measures_over_ranks
from polydraft.engine.load import draft_for
from polydraft.engine.loop.batch import Method
from polydraft.engine.measured import relative_levels
from polydraft.errors import CheckpointError, InvalidParameter, UnpairedScheme, UnsupportedModel, is_whole, near, shown
from polydraft.fetched import MODELS, SHIPPED, is_derived, is_stack
from polydraft.models import (
    HOME,
    HuggingFaceModel,
    LanguageModel,
    Pair,
    check_same_source,
    draft_model,
    is_known,
    module_of,
)
from polydraft.planning import PLANNERS
from polydraft.probs import SamplingParams
from polydraft.schemes import IID, Given, Product, Scheme, TopK
from polydraft.trees import Chain, Confident, Fixed, LearningPolicy, TreePolicy, TreeShape, Widths, as_chain
from polydraft.verifiers import (
    BlockVerification,
    ByShape,
    NaiveMatch,
    NodeVerifier,
    Optimal,
    RecursiveRejection,
    TopDown,
    TreeVerifier,
    require_greedy,
)

CERTAIN: dict[Scheme, TreeVerifier] = {
    Given(): TopDown(NaiveMatch(Given())),
    TopK(): TopDown(NaiveMatch(TopK())),
    Product(): TopDown(NaiveMatch(Product())),
}
"""The rules of drafts that are fixed by the draft rows, which naive match verifies optimally; at any temperature for
tokens from outside, at 0 for all others."""
DRAWN: dict[Scheme, TreeVerifier] = {
    Given(): TopDown(NaiveMatch(Given())),
    TopK(): TopDown(NaiveMatch(TopK())),
    Product(): TopDown(RecursiveRejection(Product())),
    IID(): ByShape(),
}
"""The rules above temperature 0. A chain is verified as a block, which no rule beats; on trees, the top tokens and one
sampled token have an optimal rule that costs next to nothing (docs/choosing.md)."""


def default_verifier(drafter: Drafter, params: SamplingParams) -> TreeVerifier:
    """Return the rule for the drafts that suit this drafter at this temperature.

    Where the usual rule is for another scheme than the drafter's own and the drafter cannot draft so, and for schemes
    that have none, chains are verified as blocks and trees by the optimal rule of a node, as far as there are these for
    the scheme; else by naive match, which is exact for all.
    """
    scheme = (drafter.defaults(params) or model_defaults(params)).scheme
    usual = (DRAWN if params.temperature else CERTAIN).get(scheme)
    if usual is not None and drafts_under(drafter, usual.scheme):
        return usual
    if params.temperature:
        with suppress(UnpairedScheme):
            tree = TopDown(Optimal(scheme))
            return ByShape(BlockVerification(scheme), tree) if scheme.lone_draft_is_drawn else tree
    return TopDown(NaiveMatch(scheme))


def default_policy(drafter: Drafter, params: SamplingParams) -> TreePolicy:
    """Return the trees that suit this drafter at this temperature.

    `polydraft tune` finds better ones for other models and machines than those that were measured.
    """
    return (drafter.defaults(params) or model_defaults(params)).policy


def default_drafter(drafter: Drafter, params: SamplingParams, device: torch.device, *, fixed: bool = False) -> Drafter:
    """Return who drafts if nothing but a draft model or a head was named: at temperature 0, a route of text before it.

    Greedy text repeats itself, and what is found in it costs no pass; at temperature 1 it is seldom right. Text is read
    on the host, for which a GPU would have to be waited for. Measured beside lookups alone (docs/performance.md).

    Args:
        drafter: the draft model's drafter, or the head's.
        params: the target's sampling settings.
        device: the target's device.
        fixed: whether trees were named, or passes are compiled, each for one shape: guesses have shapes of their own.
    """
    return drafter if fixed or params.temperature or device.type != "cpu" else route_first(drafter)


def text_word(params: SamplingParams) -> str:
    """Return the word of who drafts if nobody was named: all text drafters in one tree, or one of them in each step.

    At temperature 0 the merge was fastest. Above it drafts from text are seldom right, and a route soon drafts nothing
    where they are not (docs/performance.md).
    """
    return "route" if params.temperature else "merge"


def as_drafter(drafter: Drafter | nn.Module, *, compile: bool = False) -> Drafter:
    """Turn what users pass into a drafter: a model drafts as it was trained to (`drafter_of`), compiled if asked."""
    if not isinstance(drafter, nn.Module):
        return drafter
    if getattr(drafter, HOME, None) is not None:
        if compile:
            raise InvalidParameter("A draft model on a device of its own is not compiled; leave compile out.")
        return drafter_of(drafter)
    model = draft_model(drafter, compile=True) if compile else HuggingFaceModel(drafter)
    return ModelDrafter(model) if MASKED.isdisjoint(vars(model.model.config)) else drafter_of(model)


def without_branches(target: LanguageModel, drafter: Drafter) -> str | None:
    """Return the name of a model that scores chains only, if the target or a draft model is one.

    Raises:
        UnsupportedModel: the drafter needs a target that scores trees.
        InvalidParameter: it needs more tokens scored beside them than the target's context has.
    """
    if drafter.needs.riders >= target.facts.context:
        raise InvalidParameter(
            f"{drafter.name} needs {drafter.needs.riders} tokens scored beside the text, but the model's context has "
            f"{target.facts.context}."
        )
    if not target.facts.branches:
        name = _name(target)
        if drafter.needs.riders:
            raise UnsupportedModel(f"{name} scores chains only, but {drafter.name} needs tokens scored beside them.")
        if drafter.needs.branches:
            raise UnsupportedModel(
                f"{name} scores chains only, but {drafter.name} draft side by side in one tree; let them take turns: "
                "route_first(...), or route-first on the command line."
            )
        if drafter.needs.target and target.facts.remembers:
            raise UnsupportedModel(f"{name} remembers in states, which {drafter.name} cannot share.")
    unable = [model for model in (target, *(owned_models(drafter))) if not model.facts.branches]
    return _name(unable[0]) if unable else None


def check_crowd(target: HuggingFaceModel, drafter: Drafter, *, together: bool = False, past: bool = False) -> None:
    """Check that nothing is read beside a text on which its law would depend.

    Decoders of encoders read the rows of a batch one by one.

    Args:
        target: the target.
        drafter: who drafts.
        together: whether several texts may be read in one pass.
        past: whether a part of the text was read before.

    Raises:
        UnsupportedModel: the target scores a token by the others of its pass, and would by these.
    """
    if target.crowded is None:
        return
    ways = {
        'drafter="none" decodes it plainly': proposes(drafter),
        "give polydraft.generate one prompt at a time": together and not target.encodes,
        "leave past out": past,
    }
    for way, is_needed in ways.items():
        if is_needed:
            raise UnsupportedModel(
                f"{_name(target)} {target.crowded}, so what is read beside a token would change its law; {way}."
            )


def chained(policy: TreePolicy, name: str) -> TreePolicy:
    """Return a policy whose trees do not branch, with a note if that is another than the one that was asked for.

    Raises:
        InvalidParameter: a planner chooses among trees that branch.
    """
    if isinstance(policy, LearningPolicy) and policy.shape.max_children > 1:
        raise InvalidParameter(f"{name} scores chains only, but the planner has trees that branch; give it chains.")
    chain = as_chain(policy)
    if chain is not policy:
        warnings.warn(
            f"{name} scores chains only: drafts are chains of {chain.shape.depth} instead of {policy}.", stacklevel=2
        )
    return chain


def _name(model: LanguageModel) -> str:
    return type(module_of(model) or model).__name__


_FILE = "{0} names a file, {1}, which the command line runs but Python does not: import its class and pass {0}=CLASS()."
USUAL_DRAFTS = 20
"""Hugging Face's num_assistant_tokens where it is not said."""
MOST_LOGPROBS = 1000


@dataclass(frozen=True, eq=False)
class Choices:
    """polydraft's own arguments of a call, as they were given.

    Raises:
        InvalidParameter: `compile`, `keep_past` or `time` is neither True nor False, or `output_logprobs` no number.
    """

    drafter: object = None
    verifier: object = None
    policy: object = None
    seed: int | None = None
    generator: Generator | None = None
    compile: bool = False
    past: Any = None
    keep_past: bool = False
    output_logprobs: Any = None
    time: bool = False
    prediction: object = None

    def __post_init__(self) -> None:
        top = self.output_logprobs
        if top is not None and (not is_whole(top) or not 0 <= int(top) <= MOST_LOGPROBS):
            raise InvalidParameter(
                f"output_logprobs must be a number of tokens from 0 to {MOST_LOGPROBS}, but is {shown(top)}."
            )
        for name, value in {"compile": self.compile, "keep_past": self.keep_past, "time": self.time}.items():
            if not isinstance(value, bool):
                raise InvalidParameter(f"{name} must be True or False, but is {_described(value)}.")


def chosen_method(choices: Choices, target: HuggingFaceModel, params: SamplingParams) -> Method:
    """Return the method that the choices mean, with defaults for those that are not made.

    Raises:
        InvalidParameter: a choice is nothing that can be meant; the text says what to pass.
        CheckpointError: a draft model's folder cannot be loaded.
        UnsupportedModel: the target cannot verify drafts, or not these.
    """
    given = choices.drafter
    if choices.verifier is not None and (rule := chosen_verifier(choices.verifier, NoDraft())) is not None:
        require_greedy(rule, params.temperature)  # before a draft model is loaded
    drafter = chosen_drafter(text_word(params) if given is None else given, target, compile=choices.compile)
    if any(one.facts.encodes for one in owned_models(drafter)) and not target.encodes:
        raise InvalidParameter("The draft model has an encoder, but the target has none whose input it could read.")
    named, verifier, policy = drafter, chosen_verifier(choices.verifier, drafter), chosen_policy(choices.policy)
    if _only_names_one(given):
        weighs = policy is None or (isinstance(policy, LearningPolicy) and policy.weighs_lookups)
        fixed = choices.compile or not weighs
        drafter = default_drafter(drafter, params, target.device, fixed=fixed)
    if choices.prediction is not None:
        if not proposes(drafter):
            raise InvalidParameter(
                "prediction is to be drafted, but the drafter none drafts nothing; leave one of them out."
            )
        drafter = route_before(PredictedDrafter(cast(Any, choices.prediction)), drafter)
    check_crowd(target, drafter)
    usual = default_policy(drafter, params)
    unable = without_branches(target, drafter)
    usual = usual if unable is None else as_chain(usual)
    if isinstance(policy, LearningPolicy):
        policy.suited(usual)
        _tell_of_view(policy, target, named)
    verifier = default_verifier(drafter, params) if verifier is None else verifier
    measures = choices.prediction is None and not choices.compile  # what is predicted costs nothing
    if getattr(target.model.config, "distributed_config", None) is not None:
        fixed = not params.temperature or (choices.seed, choices.generator) != (None, None)
        measures &= measures_over_ranks(target, drafter, policy, fixed=fixed)
    if policy is None and unable is None and _only_names_one(given) and measures:
        (named, *_) = drafters_in(cast(Drafter, named))
        usual = fitted_policy(target, named, verifier, usual, params)
        if usual is None:
            return Method(NoDraft(), verifier, Chain(1))
    policy = usual if policy is None else policy
    return Method(drafter, verifier, policy if unable is None else chained(policy, unable))


def _tell_of_view(policy: LearningPolicy, target: HuggingFaceModel, drafter: object) -> None:
    """Tell a planner what drafts by a view of the target cost here, if such a view drafts alone."""
    own = drafters_in(cast(Drafter, drafter))
    relative = relative_levels(target, own[0]) if len(own) == 1 else None
    if relative is not None:
        policy.views_by(own[0].name, relative)


def _only_names_one(given: object) -> bool:
    """Tell whether no more is said than which model, head or view drafts, so that lookups may go before it."""
    if isinstance(given, Drafter) and not isinstance(given, type):
        return len(drafters_in(given)) == 1 and (bool(owned_networks(given)) or given.needs.target)
    return given is not None and not _is_word(given) and not (isinstance(given, str) and is_stack(given))


def check_reads(drafter: Drafter, target: HuggingFaceModel, sources: object) -> None:
    """Check that a drafter needs no hidden states of a prompt with images, which nobody notes.

    Raises:
        InvalidParameter: it does.
    """
    if drafter.needs.layers and sources is not None and not target.encodes:
        raise InvalidParameter(
            f"The drafter {drafter.name!r} reads hidden states, which are not known of prompts with images; take "
            "another one, such as a draft model."
        )


def chosen_drafter(given: object, target: HuggingFaceModel, *, compile: bool = False) -> Drafter:
    """Return the drafter that is meant: one, a draft model, its folder or hub name, or a word.

    What lies on this machine is a model; a text like a drafter's word is a slip of it; any other is asked of the hub.

    Raises:
        InvalidParameter: it is none of these, or a view that the target cannot have.
        CheckpointError: no model can be loaded by that name.
        StoreError: a drafter's store cannot be used.
        VocabularyMismatch: a draft model's tokens are others.
    """
    if _is_word(given):
        return drafter_line(given).named(given)
    if isinstance(given, str | Path):
        _check_no_other_word(given)
        return as_drafter(_loaded(given, target.model), compile=compile)
    if isinstance(given, nn.Module):
        check_same_source(target.model, given)
    elif isinstance(given, Drafter) and not isinstance(given, type) and not target.facts.remembers:
        check_target(given, target)
    if isinstance(given, nn.Module) or (isinstance(given, Drafter) and not isinstance(given, type)):
        return as_drafter(cast(Drafter | nn.Module, given), compile=compile)
    if isinstance(given, Pair):
        raise InvalidParameter("drafter is a Pair; pass its draft model: drafter=pair.draft.")
    raise InvalidParameter(
        "drafter must be a drafter, whose class derives from polydraft.Drafter and has a name, a draft model, its "
        f"folder, or one of {', '.join(drafter_spellings(0))}, but is {_described(given)}."
    )


def _loaded(name: str | Path, target: nn.Module) -> nn.Module | Drafter:
    """Load a draft model or a head; where there is none, and a word may have been meant, the error names all words."""
    try:
        return draft_for(name, target)
    except CheckpointError as error:
        if "/" in str(name) or is_known(str(name)) or "did you mean" in str(error):
            raise
        words = ", ".join(drafter_spellings(0))
        raise CheckpointError(f"{str(error).rstrip('.')}; drafters without a draft model are {words}.") from error


def _check_no_other_word(given: str | Path) -> None:
    """Check that a name of no folder is no word that means something elsewhere: hubs have no such models."""
    word, colon, _ = str(given).partition(":")
    if is_known(str(given)) or is_derived(given) or is_stack(given):
        return
    if names_file(str(given)):
        raise InvalidParameter(_FILE.format("drafter", given))
    if not is_drafter_word(word, MANY):
        meant = "" if "/" in word else meant_drafter(str(given), MANY) or near(word, (*MODELS, *SHIPPED))
        if meant:
            raise InvalidParameter(f"There is no drafter {shown(given)} (did you mean {meant}?).")
        return
    if colon and not drafter_line(word).takes_more:
        raise InvalidParameter(f"The drafter {word} takes nothing behind a colon; write drafter={word!r}.")
    raise InvalidParameter(
        f"The drafter {word} needs a draft model: pass the drafter itself, with its model in it, or name both to the "
        f"command line, as --draft MODEL --drafter {word}."
    )


def chosen_verifier(given: object, drafter: Drafter) -> TreeVerifier | None:
    """Return the tree verifier that is meant: one, a node rule, or a word of the command line; None for the default.

    Raises:
        InvalidParameter: it is none of these.
        UnpairedScheme: the word's rule is not exact for what the drafter drafts.
    """
    if given is None:
        return None
    if isinstance(given, str):
        if names_file(given):
            raise InvalidParameter(_FILE.format("verifier", given))
        return verifier_by_name(given, word_of(drafter))
    if not isinstance(given, type):
        if isinstance(given, TreeVerifier):
            return given
        if isinstance(given, NodeVerifier):
            return TopDown(given)
    raise InvalidParameter(
        'verifier must be a rule such as TopDown(RecursiveRejection()), or its word such as "optimal", but is '
        f"{_described(given)}."
    )


def chosen_policy(given: object) -> TreePolicy | None:
    """Return the tree policy that is meant: one, a shape, text, children per depth, or a chain's length.

    Raises:
        InvalidParameter: it is none of these, or a number is out of range.
    """
    if given is None:
        return None
    if isinstance(given, TreeShape):
        return Fixed(given)
    if isinstance(given, str):
        if given in PLANNERS:
            return PLANNERS[given]()
        meant = near(given, PLANNERS)
        if meant:
            raise InvalidParameter(f"There is no tree {shown(given)} (did you mean {meant}?).")
        return parse_policy(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return Chain(given)
    if isinstance(given, Sequence):
        policy = Widths(tuple(cast(Sequence[int], given)))
        if not policy.shape.counts:
            raise InvalidParameter('policy has no drafts; plain decoding is drafter="none".')
        return policy
    if isinstance(given, TreePolicy):
        return given
    if isinstance(getattr(given, "shape", None), TreeShape):  # a tensor has a shape as well
        raise InvalidParameter(
            f"{type(given).__name__} has a tree's shape, but its class derives neither from TreePolicy nor from "
            "GrowingPolicy; see docs/trees.md."
        )
    raise InvalidParameter(
        'policy must be a tree policy such as Chain(5), a TreeShape such as EAGLE_25, or text such as "4,2,1", but is '
        f"{_described(given)}."
    )


def with_hugging_faces_words(choices: Choices, asked: Mapping[str, Any]) -> Choices:
    """Return the choices with what Hugging Face's own arguments say of drafts.

    `assistant_model` is a drafter, and `num_assistant_tokens` and `assistant_confidence_threshold` shape its chains;
    `prompt_lookup_num_tokens` is prompt lookup, with chains so long.

    Raises:
        InvalidParameter: a drafter or a tree is named twice.
    """
    if not asked.keys() & {"assistant_model", "prompt_lookup_num_tokens"}:
        return choices
    lookup, model = asked.get("prompt_lookup_num_tokens"), asked.get("assistant_model")
    names = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if asked.get(name) is not None]
    if len(names) > 1 or choices.drafter is not None:
        other = names[1] if len(names) > 1 else "drafter"
        raise InvalidParameter(f"{names[0]} and {other} both say who drafts; give one of them.")
    drafter = model if lookup is None else NgramDrafter(asked.get("max_matching_ngram_size", 2))
    policy = _asked_chain(asked)
    if policy and choices.policy is not None:
        raise InvalidParameter("policy says how long chains are; leave the number of drafts out.")
    return replace(choices, drafter=drafter, policy=policy or choices.policy)


def _asked_chain(asked: Mapping[str, Any]) -> TreePolicy | None:
    """Return the chain that Hugging Face's arguments ask for; one that stops below doubtful drafts has a threshold."""
    length = asked.get("prompt_lookup_num_tokens", asked.get("num_assistant_tokens"))
    threshold = asked.get("assistant_confidence_threshold")
    if threshold:
        return Confident((1,) * (length or USUAL_DRAFTS), threshold)
    return None if length is None else Chain(length)


def _is_word(given: object) -> TypeGuard[str]:
    """Tell whether a value is the word of a drafter that needs no model; any other text is a folder or hub name."""
    return isinstance(given, str) and is_drafter_word(given, 0)


def _described(value: object) -> str:
    """Return what a value is, for an error: a class is told from what it makes."""
    return f"{shown(value)}; pass {value.__name__}(...)" if isinstance(value, type) else shown(value)
