"""Whether target, drafter, verifier and policy go together; where a model cannot score trees they become chains."""

import warnings

from polydraft.catalogue import every_scheme
from polydraft.drafters import Drafter, owned_models, proposes
from polydraft.engine.loop.batch import Method
from polydraft.errors import InvalidParameter, UnpairedScheme, UnsupportedModel
from polydraft.models import HuggingFaceModel, LanguageModel, module_of
from polydraft.schemes import require_pairs
from polydraft.trees import LearningPolicy, TreePolicy, as_chain
from polydraft.verifiers import require_few


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


def check_drafting(method: Method) -> None:
    """Check that a drafter can draw such trees as the verifier needs them.

    Raises:
        UnpairedScheme: it cannot draft under the verifier's scheme, or the scheme has no drafts for so many children.
    """
    drafter, verifier, policy = method.drafter, method.verifier, method.policy
    try:
        drafter.check(verifier.scheme)
    except UnpairedScheme as refusal:
        raise UnpairedScheme(f"{str(refusal).rstrip('.')}; {_fitting_verifier(drafter)}.") from refusal
    if proposes(drafter):
        most = policy.largest.max_children
        require_pairs(verifier.scheme, most)
        require_few(verifier, most)
        policy.check(verifier.scheme)


def _fitting_verifier(drafter: Drafter) -> str:
    """Say which verifier to pass: naive match, exact for all drafts, with the first scheme that the drafter takes."""
    for scheme in every_scheme():
        try:
            drafter.check(scheme)
        except UnpairedScheme:
            continue
        return f"pass a verifier of such drafts, for example verifier=TopDown(NaiveMatch({scheme}))"
    return "it takes none of this package's schemes, so pass a verifier of its own"
