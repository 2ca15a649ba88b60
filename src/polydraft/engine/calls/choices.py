"""What users pass for drafter, verifier and tree, as the parts that the engine takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

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
    Drafter,
    NgramDrafter,
    PredictedDrafter,
    drafters_in,
    owned_models,
    owned_networks,
    proposes,
    route_before,
)
from polydraft.engine.calls.fitting import chained, check_crowd, without_branches
from polydraft.engine.calls.load import draft_for
from polydraft.engine.calls.output import checked_logprobs
from polydraft.engine.defaults import as_drafter, default_drafter, default_policy, default_verifier, text_word
from polydraft.engine.loop.batch import Method
from polydraft.errors import CheckpointError, InvalidParameter, near, shown
from polydraft.fetched import MODELS, SHIPPED, is_derived
from polydraft.models import HuggingFaceModel, Pair, check_same_source, is_known
from polydraft.planning import PLANNERS
from polydraft.probs import SamplingParams
from polydraft.trees import Chain, Confident, Fixed, LearningPolicy, TreePolicy, TreeShape, Widths, as_chain
from polydraft.verifiers import NodeVerifier, TopDown, TreeVerifier

_FILE = "{0} names a file, {1}, which the command line runs but Python does not: import its class and pass {0}=CLASS()."
USUAL_DRAFTS = 20
"""Hugging Face's num_assistant_tokens where it is not said."""


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
        checked_logprobs(self.output_logprobs)
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
    drafter = chosen_drafter(text_word(params) if given is None else given, target, compile=choices.compile)
    if any(one.facts.encodes for one in owned_models(drafter)) and not target.encodes:
        raise InvalidParameter("The draft model has an encoder, but the target has none whose input it could read.")
    verifier, policy = chosen_verifier(choices.verifier, drafter), chosen_policy(choices.policy)
    if _only_names_one(given):
        weighs = policy is None or (isinstance(policy, LearningPolicy) and policy.weighs_lookups)
        fixed = choices.compile or not weighs
        drafter = default_drafter(drafter, params, target.device, fixed=fixed)
    if choices.prediction is not None:
        drafter = _with_prediction(choices.prediction, drafter)
    check_crowd(target, drafter)
    usual = default_policy(drafter, params)
    unable = without_branches(target, drafter)
    usual = usual if unable is None else as_chain(usual)
    if isinstance(policy, LearningPolicy):
        policy.suited(usual)
    verifier = default_verifier(drafter, params) if verifier is None else verifier
    policy = usual if policy is None else policy
    return Method(drafter, verifier, policy if unable is None else chained(policy, unable))


def _with_prediction(prediction: object, drafter: Drafter) -> Drafter:
    """Return a drafter with a prediction before it, row by row.

    Raises:
        InvalidParameter: nothing is to be drafted.
    """
    if not proposes(drafter):
        raise InvalidParameter(
            "prediction is to be drafted, but the drafter none drafts nothing; leave one of them out."
        )
    return route_before(PredictedDrafter(cast(Any, prediction)), drafter)


def _only_names_one(given: object) -> bool:
    """Tell whether no more is said than which draft model or head drafts, so that lookups may go before it."""
    if isinstance(given, Drafter) and not isinstance(given, type):
        return len(drafters_in(given)) == 1 and bool(owned_networks(given))
    return given is not None and not _is_word(given)


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
        InvalidParameter: it is none of these.
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
    """Check that a name of no folder is no word that means something elsewhere: hubs have no such models.

    Raises:
        InvalidParameter: it is, or it is like a drafter's word.
    """
    word, colon, _ = str(given).partition(":")
    if is_known(str(given)) or is_derived(given):
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
        return PLANNERS[given]() if given in PLANNERS else _parsed(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return Chain(given)
    if isinstance(given, Sequence):
        return _with_drafts(Widths(tuple(cast(Sequence[int], given))))
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


def _parsed(text: str) -> TreePolicy:
    """Read a tree, or say that a planner was likely meant."""
    meant = near(text, PLANNERS)
    if meant:
        raise InvalidParameter(f"There is no tree {shown(text)} (did you mean {meant}?).")
    return parse_policy(text)


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


def _with_drafts(policy: TreePolicy) -> TreePolicy:
    if not policy.shape.counts:
        raise InvalidParameter('policy has no drafts; plain decoding is drafter="none".')
    return policy


def _is_word(given: object) -> TypeGuard[str]:
    """Tell whether a value is the word of a drafter that needs no model; any other text is a folder or hub name."""
    return isinstance(given, str) and is_drafter_word(given, 0)


def _described(value: object) -> str:
    """Return what a value is, for an error: a class is told from what it makes."""
    return f"{shown(value)}; pass {value.__name__}(...)" if isinstance(value, type) else shown(value)
