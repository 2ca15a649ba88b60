"""What a call returns, with Hugging Face's names and shapes, and what its models know of the text afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, owned_networks
from polydraft.engine.emission import Block, Emission, Statistics
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import InvalidParameter, shown
from polydraft.models import LanguageModel, chosen_precision, function_of, module_of, same_model
from polydraft.probs import filtered_scores
from polydraft.reading import Reader, Text
from polydraft.rows import within
from polydraft.trees import Verdict

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
        Such a drafter is given the states of one token at least, which some draft from. The newest tokens whose queries
        choose a view's keys are read again where its state has not kept them: it would choose by the last one alone.
        """
        reads = bool(drafter.needs.layers)
        if reads and not _is_of(drafter, self.drafts):
            return 0
        ours, theirs = self.text.tokens[0, : int(self.text.lengths) - 1], prompt.tokens[0, : int(prompt.lengths) - 1]
        common = max(min(len(ours), len(theirs) - reads), 0)
        differ = (ours[:common] != theirs[:common].to(ours.device)).nonzero()
        known = int(differ[0]) if len(differ) else common
        if drafter.needs.queries and not _has_queries(self.drafts, known):
            known = max(min(known, len(theirs) - drafter.needs.queries), 0)
        return self.reader.kept(0, known)


def check_past(past: object, target: LanguageModel, prompt: Text, *, alone: bool = True) -> None:
    """Check that a run can go on from a past, or keep one where there is none yet.

    Raises:
        InvalidParameter: there are several rows, or they are not text `alone`; this is no past, or one of another model
            or the model has changed since.
    """
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


def _has_queries(state: object, known: int) -> bool:
    """Tell whether a state has kept the queries that choose among the keys of so many tokens."""
    told = [getattr(one, "has_queries", None) for one in within(state)]
    return any(has(known) for has in told if has is not None)


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


@dataclass(frozen=True)
class Logprob:
    """What the model holds of a place in the text.

    Args:
        token: the token that was emitted there.
        logprob: its log-probability.
        top: the likeliest tokens there with theirs, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def with_logprobs(
    gains: Mapping[int, Emission], verdict: Verdict, logits: Float[Tensor, "b n V"], top: int
) -> dict[int, Emission]:
    """Return what rows gained with a `Logprob` for each token.

    Args:
        gains: what each row gained.
        verdict: what was kept of the trees.
        logits: the target's at every node.
        top: how many of the likeliest tokens are told beside.
    """
    return {
        row: replace(gained, logprobs=_of_row(gained.tokens, verdict, logits, row, top))
        for row, gained in gains.items()
    }


def _of_row(
    tokens: Sequence[int], verdict: Verdict, logits: Float[Tensor, "b n V"], row: int, top: int
) -> tuple[Logprob, ...]:
    nodes = [0, *verdict.path[row, : verdict.kept[row]].tolist()][: len(tokens)]
    rows = logits[row, nodes].double().log_softmax(dim=-1)
    own = rows.gather(-1, torch.tensor(tokens, device=rows.device).unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = (found.tolist() for found in rows.topk(min(int(top), rows.shape[-1]), dim=-1))
    return tuple(
        Logprob(token, mine, tuple(zip(ids[place], values[place], strict=True)))
        for place, (token, mine) in enumerate(zip(tokens, own, strict=True))
    )


Rows = tuple[Float[Tensor, "b V"], ...]


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """What `generate` returns; `out["sequences"]` and `out.sequences` are the same, as with Hugging Face's outputs.

    Args:
        sequences: prompts and new tokens; finished rows are filled with the padding id.
        statistics: counts, acceptance, times, and the processors and filters in force.
        finish: per row, why it ended: "eos", "stop", "length", or "context" where the model's context cut it short.
        scores: with output_scores, for each new token the scores that it was chosen by, after all processors and
            filters; zeros in rows that had ended. Else None.
        logits: with output_logits, likewise the target's own logits.
        logprobs: with output_logprobs, per row a `Logprob` for each new token. Else None.
        past: with keep_past, what the models know of the text, for a call whose prompt begins like it. Else None.
        verifier: the name of the rule that kept drafts.
        lossless: whether that rule keeps the model's law; False for a lossy one.
    """

    sequences: Int[Tensor, "b s"]
    statistics: Statistics
    finish: tuple[str, ...]
    scores: Rows | None = None
    logits: Rows | None = None
    past: Past | None = None
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    verifier: str = field(kw_only=True)
    lossless: bool = field(kw_only=True)

    def __getitem__(self, name: str | int) -> Any:
        """Return a field by its name, or by its place among those that are there."""
        return self.to_tuple()[name] if isinstance(name, int) else dict(self.items())[name]

    def __contains__(self, name: object) -> bool:
        return name in dict(self.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields that are there."""
        return tuple(name for name, _ in self.items())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields that are there by name."""
        found = ((one.name, getattr(self, one.name)) for one in fields(self))
        return tuple((name, value) for name, value in found if value is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are there."""
        return tuple(value for _, value in self.items())


def emitted_rows(block: Block, laws: tuple[TargetLaw, ...]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return, of every row that gained tokens, the logits and the final scores "s V" that each was chosen by."""
    found = dict[int, tuple[Tensor, Tensor]]()
    if block.logits is None or block.scores is None:
        return found
    for row, gained in block.rows.items():
        nodes = [0, *block.verdict.path[row].tolist()][: len(gained.tokens)]
        found[row] = block.logits[row, nodes], filtered_scores(block.scores[row, nodes], laws[row].params)
    return found


def in_steps(rows: list[list[Float[Tensor, "_ V"]]]) -> Rows:
    """Return the rows' tensors, one after the other, as one tensor "b V" for each token of the longest row."""
    texts = [torch.cat(parts) if parts else None for parts in rows]
    longest = max((len(text) for text in texts if text is not None), default=0)
    like = next((text for text in texts if text is not None), None)
    if like is None:
        return ()
    result = like.new_zeros(longest, len(rows), like.shape[-1])
    for row, text in enumerate(texts):
        if text is not None:
            result[: len(text), row] = text
    return tuple(result)
