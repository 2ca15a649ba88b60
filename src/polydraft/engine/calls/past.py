"""What models know of a text that was read and written, so that of the next one only what is new is read."""

from dataclasses import dataclass
from typing import Any

import torch

from polydraft.drafters import Drafter, owned_networks
from polydraft.errors import InvalidParameter, shown
from polydraft.models import LanguageModel, chosen_precision, function_of, module_of, same_model
from polydraft.reading import Reader, Text
from polydraft.rows import within

OTHERWISE = "other layers, hooks or settings"


@dataclass(frozen=True, eq=False)
class Past:
    """A run's text, and what its models remember of it: the target's keys and values, and the drafter's state.

    It stays as it is, however many runs go on from it, and as large: two tensors per layer and model.

    Args:
        target: the model that read the text.
        text: one row, the prompt and what was written.
        reader: the target, which has read all tokens but the last.
        drafts: the drafter's state; None if another drafter goes on, so that nothing is known of its own.
        function: what the target was when it began to read (`state_of`).
    """

    target: LanguageModel
    text: Text
    reader: Reader
    drafts: Any
    function: Any

    def known(self, prompt: Text, drafter: Drafter) -> int:
        """Return how many tokens of a prompt need not be read.

        Those with which both begin, but for either's last; none if the target remembers more than those in states, or
        if the drafter reads the target's hidden states, which are not kept, and cannot go on from what it made of them.
        Such a drafter is given the states of one token at least, which some draft from.
        """
        reads = bool(drafter.needs.layers)
        if reads and not _is_of(drafter, self.drafts):
            return 0
        ours, theirs = self.text.tokens[0, : int(self.text.lengths) - 1], prompt.tokens[0, : int(prompt.lengths) - 1]
        common = max(min(len(ours), len(theirs) - reads), 0)
        differ = (ours[:common] != theirs[:common].to(ours.device)).nonzero()
        return self.reader.kept(0, int(differ[0]) if len(differ) else common)


def check_past(past: object, target: LanguageModel, prompt: Text, *, keeps: bool = False, alone: bool = True) -> None:
    """Check that a run can go on from a past, and keep one if it is to.

    Raises:
        InvalidParameter: there are several rows, or they are not text `alone`; this is no past, or one of another model
            or the model has changed since.
    """
    if past is None and not keeps:
        return
    name, rows = "keep_past" if past is None else "past", len(prompt.lengths)
    if not alone:
        raise InvalidParameter(f"{name} is for prompts of plain text, read in one direction; leave it out.")
    if rows != 1:
        raise InvalidParameter(f"{name} is for one text, but there are {rows} rows; leave it out.")
    if past is None:
        return
    if not isinstance(past, Past):
        raise InvalidParameter(f"past must be what a run with keep_past=True has as its past, but is {shown(past)}.")
    if not same_model(past.target, target):
        raise InvalidParameter("past is of another model than this one; leave it out, so that the prompt is read.")
    now: Any = state_of(target)
    if past.function != now:
        raise _changed("other weights" if now is None or past.function[0] != now[0] else OTHERWISE)


@torch.inference_mode()
def check_keys(reader: Reader, text: Text) -> None:
    """Check that a model still makes of a text what a copy of a past holds; states cannot be taken back, to look.

    A model may have become another function where no field of its modules shows it: by an object that they hold, or by
    what a hook closes over.

    Args:
        reader: knows of the only row what the past knew; the keys of its last token are written anew.
        text: the new prompt.

    Raises:
        InvalidParameter: the last known token has other keys or values by now.
    """
    if not reader.model.facts.remembers and not reader.agrees(text):
        raise _changed(OTHERWISE)


def _is_of(drafter: Drafter, state: object) -> bool:
    """Tell whether a drafter's network has made a state, or one that stands in it."""
    values = [value for one in within(state) for value in getattr(one, "__dict__", {}).values()]
    return any(network is value for network in owned_networks(drafter) for value in values)


def _changed(what: str) -> InvalidParameter:
    return InvalidParameter(f"past is of {what} than the model has now; leave it out, so that the prompt is read.")


@torch.inference_mode()
def committed(text: Text) -> Text:
    """Return a copy of a text without the room behind it, which stays as it is when the text goes on."""
    return Text(text.tokens[:, : int(text.lengths.max())].clone(), text.lengths.clone())


def state_of(target: LanguageModel) -> object:
    """Return what changes when a model, or the precision of its passes, does, as far as one can look into it."""
    module = module_of(target)
    return None if module is None else (*function_of(module), chosen_precision(target.facts.device))
