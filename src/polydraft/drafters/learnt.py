"""A draft model whose weights were learnt from texts: a version of them is a value, and a text keeps the one it has."""

from dataclasses import dataclass
from typing import Any

from polydraft.drafters.contract import Drafter, digest_of, owned_models
from polydraft.drafters.model import ModelDrafter
from polydraft.errors import InvalidParameter


@dataclass(frozen=True, eq=False)
class LearntDrafter(ModelDrafter):
    """Draft with one version of a draft model's weights, which never change.

    The law of a text is its target's whatever the weights are, as long as they are fixed before a draft is drawn and do
    not depend on the numbers that it is drawn by. A version may have been learnt from what the same seed wrote, so its
    key goes into the noise (`Outside`).

    Args:
        version: its name, as answers tell it.
        key: tells it from all other versions; nothing for weights that nothing was learnt for.
        mark: of the last time that everything was forgotten; what is learnt from a text is forgotten with it.
    """

    version: str = ""
    key: bytes = b""
    mark: str = ""
    sound = True

    def outside(self, row: int) -> bytes:
        """Return the version's key."""
        return digest_of(b"learnt weights", self.key) if self.key else b""


def module_to_learn(drafter: Drafter | None) -> Any:
    """Return the module of a draft model of its own, whose weights can be learnt.

    Raises:
        InvalidParameter: it is something else; the text says what learns.
    """
    models = () if drafter is None else owned_models(drafter)
    module: Any = getattr(models[0], "model", None) if len(models) == 1 else None
    if drafter is None or drafter.name != ModelDrafter.name or module is None:
        name = "no draft" if drafter is None else f"the {drafter.name} drafter"
        raise InvalidParameter(
            f"--learn is for a draft model of its own, such as pair-draft or a folder of one, not for {name}: name one "
            "by --draft, or leave --learn out."
        )
    if not all(one.is_floating_point() for one in module.state_dict().values()):
        raise InvalidParameter(
            "--learn is for a draft model whose weights are all floating point numbers, and this one's are rounded: "
            "name the unrounded one by --draft, or leave --learn out."
        )
    return module
