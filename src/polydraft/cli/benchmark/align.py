"""`polydraft align`: a draft for the user's own target, made and judged; or, with --measure, a draft measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from polydraft.bench.aligning.form_costs import FormCost, cost_of
from polydraft.bench.bootstrap import Estimate, bootstrap_weights, estimate, widening_for_few
from polydraft.bench.prompts.prompt import encode
from polydraft.catalogue import drafter_line, is_drafter_word
from polydraft.cli.benchmark.align_making import run_making
from polydraft.cli.clashes import read_asked, refuse_clashes
from polydraft.cli.printing import columns, counted, print_json_line
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import stopped
from polydraft.drafters import Drafter, drafter_of, stretches
from polydraft.engine import load
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, Pair
from polydraft.options.commands.align_options import AlignOptions
from polydraft.probs import SamplingParams, filters_in_force
from polydraft.training.alignment.draft_worth import BLOCK, RULES, DraftWorth, measure_draft
from polydraft.training.heads.head_making import end_ids_of

EXCERPT_TOKENS = 64
USUAL_HEATS = (0.0, 1.0)
LENGTH, LIMIT = 5, 16
"""The drafts of the longest chain, and the prompts of each task, where a draft is measured."""
OF_MAKING = {"out": "--out", "work": "--work", "minutes": "--minutes", "forms": "--form", "losses": "--loss"}
OF_MAKING |= {"texts": "--texts", "most_bytes": "--most-bytes"}
"""The options that are of no use where a draft is measured alone."""


def run_align(request: AlignOptions) -> int:
    """Make a draft and judge it, or measure one, and print what was found.

    Returns the exit code: 0, 3 if what was made is no better than what was there before, or 130 after Ctrl-C.

    Raises:
        InvalidParameter: options that do not go together, or prompts that do not fit.
        PolydraftError: what cannot be loaded, made or measured.
    """
    if not request.measure:
        return run_making(request)
    heats = request.temperatures or USUAL_HEATS
    check_request(request, heats)
    notes = new_console(errors=True, quiet=request.as_json)
    sources = request.prompts or (("python",) if request.target == "pair" else ("humaneval", "gsm8k"))
    prompts = read_asked(sources, request.limit or LIMIT, request.chat_template)
    try:
        with notes.status("Loading the models ..."):
            word = str(request.draft)
            alone = drafter_line(word).named(word) if is_drafter_word(word, 0) else None
            pair = load(request.target, None if alone else word, dtype=request.dtype, device=request.device)
        encoded = _fitting(pair, [encode(pair, prompt, EXCERPT_TOKENS)[0] for prompt in prompts], request)
        found, speeds = dict[float, DraftWorth](), dict[float, list[float]]()
        draft = alone or (pair.draft if isinstance(pair.draft, Drafter) else drafter_of(pair.draft))
        for heat in heats:
            with notes.status(f"The target writes at temperature {heat:g}, and its draft is asked along ..."):
                found[heat] = _measured(pair, draft, encoded, heat, request)
            with notes.status("Passes and drafts are timed ..."):
                timed = len(stretches(draft, request.length or LENGTH)) == 1
                cost = cost_of(HuggingFaceModel(pair.target), draft, heat) if timed else FormCost()
                speeds[heat] = predicted(found[heat], cost)
    except KeyboardInterrupt:
        return stopped()
    if request.as_json:
        print_json_line(as_dict(request, found, speeds))
    else:
        _show(request, found, speeds)
    return 0


def check_request(request: AlignOptions, heats: Sequence[float]) -> None:
    """Check what can be checked before models are loaded.

    Raises:
        InvalidParameter: options that do not go together, or a temperature out of range.
    """
    twice = ", ".join(f"{heat:g}" for heat in heats)
    filters = SamplingParams(**request.filters)
    filtered = filters_in_force(filters)
    idle = [flag for name, flag in OF_MAKING.items() if getattr(request, name) not in (None, ())]
    refuse_clashes(
        (idle, f"{' and '.join(idle)} would do nothing with --measure, which makes no draft: leave one of them out."),
        (request.draft is None, "--draft is missing: name the draft model or head that is to be measured."),
        (len({*heats}) < len(heats), f"A temperature is given twice: {twice}."),
        (
            bool(filtered) and not any(heats),
            f"{', '.join(filtered)} would do nothing at temperature 0; name a temperature above 0 or leave it out.",
        ),
    )
    for heat in heats:
        SamplingParams(temperature=heat)


def _fitting(pair: Pair, prompts: Sequence[Tensor], request: AlignOptions) -> list[Tensor]:
    room = HuggingFaceModel(pair.target).context - request.max_new_tokens - (request.length or LENGTH)
    fitting = [ids for ids in prompts if 0 < len(ids) <= room]
    if not fitting:
        raise InvalidParameter(
            f"No prompt leaves room for {request.max_new_tokens} new tokens in the context; give shorter ones, "
            "or a smaller --max-new-tokens."
        )
    return fitting


def predicted(found: DraftWorth, cost: FormCost) -> list[float]:
    """Return how much faster than plain decoding chains of 1, 2, ... drafts are, as blocks, as far as was timed."""
    return [tokens / step for tokens, step in zip(found.tokens_per_call[BLOCK], cost.steps, strict=False)]


def _measured(pair: Pair, draft: Drafter, prompts: Sequence[Tensor], heat: float, request: AlignOptions) -> DraftWorth:
    return measure_draft(
        HuggingFaceModel(pair.target),
        draft,
        prompts,
        SamplingParams(temperature=heat, **request.filters),
        length=request.length or LENGTH,
        new_tokens=request.max_new_tokens,
        ends=end_ids_of(cast(Any, pair.target)),
        seed=request.seed,
    )


def estimates(found: DraftWorth, seed: int) -> dict[str, list[Estimate]]:
    """Return tokens per call by rule, for chains of 1, 2, ... drafts, with intervals over texts."""
    weights, widening = bootstrap_weights(len(found.tokens), seed), widening_for_few(len(found.tokens))
    tokens = found.tokens.numpy()
    return {
        rule: [_possible(estimate(tokens, calls.numpy(), weights, widening)) for calls in found.calls[rule].unbind(-1)]
        for rule in RULES
    }


def _possible(one: Estimate) -> Estimate:
    """Return an interval without what no call can bring: a call brings one token at least."""
    return one if one.low is None else replace(one, low=max(one.low, 1.0))


def as_dict(
    request: AlignOptions, found: Mapping[float, DraftWorth], speeds: Mapping[float, list[float]]
) -> dict[str, Any]:
    """Return what was measured, for JSON."""
    return {
        "target": request.target,
        "draft": request.draft,
        "temperatures": [
            {
                "temperature": heat,
                "texts": len(one.tokens),
                "tokens": int(one.tokens.sum()),
                "overlap": list(one.overlap),
                "predicted_speed": speeds[heat],
                "tokens_per_call": {
                    rule: [vars(value) for value in values] for rule, values in estimates(one, request.seed).items()
                },
            }
            for heat, one in found.items()
        ],
    }


def _show(request: AlignOptions, found: Mapping[float, DraftWorth], speeds: Mapping[float, list[float]]) -> None:
    console = new_console()
    for heat, one in found.items():
        table = columns((), ("drafts", *(f"{rule}, 95 %" for rule in RULES), "overlap", "speed"))
        values = estimates(one, request.seed)
        for place, overlap in enumerate(one.overlap):
            cells = [_in_words(values[rule][place]) for rule in RULES]
            speed = f"{speeds[heat][place]:.2f}x" if place < len(speeds[heat]) else ""
            table.add_row(str(place + 1), *cells, f"{overlap:.3f}", speed)
        texts = counted(len(one.tokens), "text")
        console.print(
            f"Temperature {heat:g}: tokens per target call of chains, on {int(one.tokens.sum())} tokens in {texts}"
        )
        console.print(table)
    speed = (
        "Speed is predicted, over plain decoding: tokens per call as a block over the time of a step, as passes and "
        "drafts take here."
        if any(speeds.values())
        else "No speed is predicted: passes here are too slow to be timed, or drafts cost another time at each depth."
    )
    console.print(
        f"Overlap is the mean of sum min(target, draft) by draft, given the text's tokens above it. {speed}",
        soft_wrap=True,
    )


def _in_words(one: Estimate) -> str:
    return (
        f"{one.mean:.3f}" if one.low is None or one.high is None else f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"
    )
