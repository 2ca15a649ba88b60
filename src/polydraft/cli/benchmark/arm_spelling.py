"""Arms as they are spelt on the command line: "default", "hf-assisted tokens=5", "tree=3,2 verifier=optimal"."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from polydraft.bench.environment import described
from polydraft.bench.speed import (
    LOOKUP_TOKENS,
    PLAIN,
    Arm,
    SpeedSettings,
    assisted_arm,
    drafting_arm,
    hugging_face_arm,
    lookup_arm,
    plain_arm,
    rounded_arm,
)
from polydraft.catalogue import (
    AUTO,
    digests,
    drafter_line,
    drafter_spellings,
    is_drafter_word,
    meant_drafter,
    names_file,
    own_drafter,
    own_rule,
    parse_policy,
    verifier_by_name,
)
from polydraft.drafters import MASKED, own_model
from polydraft.engine import as_drafter, draft_for
from polydraft.errors import InvalidParameter, PolydraftError, lowered, near
from polydraft.models import Pair
from polydraft.options.value_checks import model_name
from polydraft.verifiers import require_greedy

DEFAULT_ARMS = (PLAIN, "default", "hf", "hf-assisted", "hf-lookup")
PREDICTION = "prediction"
"""The arm that drafts from each prompt's file while the answer is like it, and else as the default does."""
ASSISTED = {"tokens": "num_assistant_tokens", "threshold": "assistant_confidence_threshold"}
KEYS = {
    PLAIN: (),
    "default": (),
    "hf": (),
    "hf-assisted": tuple(ASSISTED),
    "hf-lookup": ("tokens",),
    "bfloat16": (),
    PREDICTION: (),
    "": ("draft", "drafter", "tree", "verifier", "scheme", "bottom-up"),
}
MODEL, TEXT = "model", "merge"
"""The words of the drafters that arms have where they name none: with a draft model and without."""
FLAGS = ("bottom-up",)


@dataclass(frozen=True)
class ArmSpelling:
    """An arm as it was given: its name in results, the word of a named arm if it is one, its settings, and its text."""

    name: str
    kind: str
    settings: dict[str, str]
    text: str


def spell_arm(text: str) -> ArmSpelling:
    """Read an arm: a named one with its settings, or a configuration of polydraft's; name=... renames it.

    Raises:
        CheckpointError: a draft of its own means a folder, and there is none.
        InvalidParameter: an unknown word or key, or a value that is none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidParameter(f"The arm {text!r} cannot be read: {error}.") from error
    kind = words[0] if words and words[0] in KEYS else ""
    settings: dict[str, str] = {}
    for word in words[1:] if kind else words:
        key, sign, value = word.partition("=")
        flag = key in FLAGS
        if key not in (*KEYS[kind], "name") or flag == bool(sign):
            raise InvalidParameter(f"The arm {text!r}: {word!r} is not known{_meant(kind, word) or _known(kind)}.")
        if flag == bool(value):
            raise InvalidParameter(f"The arm {text!r}: {key}= has no value.")
        if key in settings:
            raise InvalidParameter(f"The arm {text!r}: {key} is given twice.")
        settings[key] = value
    if not words:
        raise InvalidParameter(f"An arm is empty{_known('')}.")
    rest = " ".join(word for word in words if not word.startswith("name="))
    name = settings.pop("name", rest)
    if name == PLAIN and kind != PLAIN:
        raise InvalidParameter(f"The arm {text!r}: the name {PLAIN} is that of decoding without drafts.")
    _check_settings(text, kind, settings)
    return ArmSpelling(name, kind, settings, rest)


def _known(kind: str) -> str:
    keys = ", ".join(key if key in FLAGS else f"{key}=..." for key in (*KEYS[kind], "name"))
    return (
        f"; {kind} takes {keys}" if kind else f"; an arm is one of {', '.join(filter(None, KEYS))}, or made of {keys}"
    )


def _meant(kind: str, word: str) -> str:
    """Return the question whether a key or the name of an arm was meant; empty if the word is like none."""
    key, sign, value = word.partition("=")
    meant = near(key, (*KEYS[kind], "name") if sign or kind else (*filter(None, KEYS), *FLAGS))
    return f" (did you mean {meant}{sign}{value}?)" if meant and meant != key else ""


def _check_settings(text: str, kind: str, settings: dict[str, str]) -> None:
    _numbers(text, settings)
    if not kind:
        _run_files(settings)
        drafter = settings.get("drafter", MODEL)
        if not is_drafter_word(drafter, 1, proposing=True):
            words, meant = ", ".join(drafter_spellings(1, proposing=True)), meant_drafter(drafter, 1, proposing=True)
            told = (
                f"there is no drafter {drafter!r} (did you mean {meant}?)"
                if meant
                else f"the drafter is one of {words}"
            )
            raise InvalidParameter(f"The arm {text!r}: {told}.")
        drafter_line(drafter).arguments_in(drafter)
        _configuration(settings, drafter)
        _check_draft(text, settings.get("draft"), drafter)


def _run_files(settings: dict[str, str]) -> None:
    """Put rules and drafters of the user's own into the catalogue."""
    for key, load in {"verifier": own_rule, "drafter": own_drafter}.items():
        if names_file(settings.get(key, "")):
            load(settings[key])


def _check_draft(text: str, draft: str | None, drafter: str) -> None:
    if draft is None:
        return
    if is_drafter_word(draft, 0):
        raise InvalidParameter(f"The arm {text!r}: draft= names a draft model or head; write drafter={draft}.")
    if not drafter_line(drafter).models:
        raise InvalidParameter(f"The arm {text!r}: the drafter {drafter} takes no draft model: leave draft= out.")
    model_name(draft)


def _numbers(text: str, settings: dict[str, str]) -> dict[str, int | float]:
    result: dict[str, int | float] = {}
    kinds: dict[str, Callable[[str], int | float]] = {"tokens": int, "threshold": float}
    for key in settings.keys() & kinds.keys():
        try:
            result[key] = kinds[key](settings[key])
        except ValueError as error:
            raise InvalidParameter(f"The arm {text!r}: {key} is not a number: {settings[key]!r}.") from error
        if result[key] < (key == "tokens") or (key == "threshold" and not result[key] <= 1):
            raise InvalidParameter(f"The arm {text!r}: tokens start at 1, and the threshold lies between 0 and 1.")
    return result


def _configuration(settings: dict[str, str], drafter: str) -> dict[str, Any]:
    """Return the verifier and policy of a configuration, None for those that are not said."""
    rule, scheme = settings.get("verifier", AUTO), settings.get("scheme")
    tree = settings.get("tree")
    return {
        "verifier": verifier_by_name(rule, drafter, scheme, bottom_up="bottom-up" in settings),
        "policy": parse_policy(tree) if tree else None,
    }


def check_temperatures(spellings: Sequence[ArmSpelling], temperatures: Sequence[float]) -> None:
    """Check that arms verify by rules for all temperatures.

    Raises:
        InvalidParameter: a rule is for temperature 0 alone.
    """
    for one in spellings:
        rule = verifier_by_name(one.settings.get("verifier", AUTO), "")
        if rule is not None:
            require_greedy(rule, max(temperatures))


def drafting_arms(spellings: Sequence[ArmSpelling]) -> bool:
    """Tell whether any arm drafts by the run's draft if there is one; no spellings are the usual arms, which do."""
    return not spellings or any(
        one.kind in ("default", PREDICTION, "hf-assisted")
        or (
            not one.kind and "draft" not in one.settings and drafter_line(one.settings.get("drafter", MODEL)).models > 0
        )
        for one in spellings
    )


def build_arms(pair: Pair, spellings: Sequence[ArmSpelling], settings: SpeedSettings) -> list[Arm]:
    """Return the arms, plain decoding first; no spellings are all the usual arms that the models and batches allow.

    Raises:
        CheckpointError: an arm's own draft model or head is missing or damaged.
        InvalidParameter: an arm needs a draft model and there is none.
        TargetMismatch: an arm's own head is for another target.
        VocabularyMismatch: an arm's own draft has other tokens.
    """
    if not spellings:
        model = _model_of(pair)
        assists = model is not None and MASKED.isdisjoint(vars(model.config))
        usual = [spell_arm(name) for name in DEFAULT_ARMS if assists or name != "hf-assisted"]
        arms = [_arm(pair, one) for one in usual]
        return [arm for arm in arms if arm.most_rows is None or arm.most_rows >= min(settings.batch_sizes)]
    arms = [_arm(pair, one) for one in spellings]
    return arms if any(arm.name == PLAIN for arm in arms) else [plain_arm(pair.target), *arms]


def _arm(pair: Pair, one: ArmSpelling) -> Arm:
    try:
        return _described(pair, one)
    except PolydraftError as error:
        if str(error).startswith("The arm "):
            raise
        raise type(error)(f"The arm {one.name!r}: {lowered(error)}") from error


def _model_of(pair: Pair) -> Any:
    """Return the model of a pair's draft: itself, or that which a view's word means too; None for none."""
    return pair.draft if isinstance(pair.draft, nn.Module) else own_model(pair.draft, pair.target)


def _described(pair: Pair, one: ArmSpelling) -> Arm:
    """Return an arm; what it is includes the weights and files of its own, so that others are not taken for them."""
    named = one.settings.get("draft")
    own = [f"file {digest}" for word, digest in digests().items() if word in one.settings.values()]
    if named is not None:
        draft = draft_for(str(model_name(named)), pair.target)
        pair, own = replace(pair, draft=draft), [f"weights {described(draft)['weights']}", *own]
    told = f"{one.text} ({', '.join(own)})" if own else one.text
    return replace(_built(pair, one), name=one.name, description=told)


def _built(pair: Pair, one: ArmSpelling) -> Arm:
    target, draft, numbers = pair.target, pair.draft, _numbers(one.text, one.settings)
    if one.kind == PLAIN:
        return plain_arm(target)
    if one.kind == "bfloat16":
        return rounded_arm(target)
    if one.kind == "hf":
        return hugging_face_arm(target)
    if one.kind == PREDICTION:
        return drafting_arm(one.name, target, draft, predicts=True)
    if one.kind == "hf-lookup":
        return lookup_arm(target, tokens=int(numbers.get("tokens", LOOKUP_TOKENS)))
    drafter = one.settings.get("drafter", MODEL if draft is not None or one.kind == "hf-assisted" else "")
    if not drafter:
        return drafting_arm(one.name, target, None, **_configuration(one.settings, TEXT))
    line = drafter_line(drafter)
    if not line.models:
        return drafting_arm(one.name, target, line.named(drafter), **_configuration(one.settings, drafter))
    if draft is None:
        raise InvalidParameter(f"The arm {one.name!r} needs a draft model: give --draft beside --target.")
    if one.kind == "hf-assisted":
        model = _model_of(pair)
        if model is None:
            raise InvalidParameter(f"The arm {one.name!r} needs a draft model, and what drafts here is none.")
        if not MASKED.isdisjoint(vars(model.config)):
            raise InvalidParameter(
                f"The arm {one.name!r} needs a draft model that drafts token by token, not for masks."
            )
        settings: dict[str, Any] = {ASSISTED[key]: value for key, value in numbers.items()}
        return assisted_arm(target, model, **settings)
    drafts = draft if drafter == MODEL else line.of(as_drafter(draft))
    return drafting_arm(one.name, target, drafts, **_configuration(one.settings, drafter))
