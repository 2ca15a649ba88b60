"""`polydraft generate`: stream a text with its provenance, then say what happened."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from polydraft.bench.prompts import Prompt, as_asked
from polydraft.bench.prompts.prompt import encode
from polydraft.catalogue import drafter_line, parse_policy, verifier_by_name
from polydraft.cli.clashes import LONE_DRAFT, idle_filters, refuse_clashes
from polydraft.cli.generation.summaries import describe_setup, print_run
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import notes_beside, print_json_line, progress_bar, visible, warnings_as_sentences
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.drafters import Drafter, drafts_inside, proposes
from polydraft.engine import Comparison, Run, as_drafter, compare, default_drafter, load, stream, text_word
from polydraft.engine.tuning import planned
from polydraft.errors import InvalidParameter, near
from polydraft.models import Grammar, Pair, StreamDecoder, load_pair, shipped_head, text_of
from polydraft.options.commands.generate_options import GenerateOptions
from polydraft.options.commands.option_groups import ModelOptions
from polydraft.options.option import check_keywords
from polydraft.options.sampling_options import Sampling
from polydraft.options.value_checks import has_half_character
from polydraft.planning import PLANNERS, PairPlan, load_plan
from polydraft.probs import SamplingParams
from polydraft.trees import LearningPolicy, TreePolicy
from polydraft.verifiers import require_greedy

DRAFTED, OWN = "green", "bold"
"""The styles of accepted drafts, and of the tokens that the target chose itself."""
COMPARE_REPEATS = 5
WARM_UP_STEPS = 3
"""The first two steps meet every shape; the third runs without compiling."""
DRAFTLESS = "--drafter {} needs a draft model: give --draft."


def given_prompt(prompt: str | None) -> str:
    """Return the prompt; "-" means standard input.

    Raises:
        InvalidParameter: standard input cannot be read, or is not UTF-8.
    """
    if prompt != "-":
        return prompt or ""
    if sys.stdin.isatty():
        sys.stderr.write("The prompt is read from the keyboard; Ctrl-D ends it.\n")
    try:
        text = sys.stdin.read()
    except OSError as error:
        raise InvalidParameter(f"Standard input cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"Standard input is not UTF-8: {error.reason} at byte {error.start}.") from error
    if has_half_character(text):
        raise InvalidParameter("Standard input is not UTF-8: give the prompt in UTF-8.")
    return text


def plan_file(request: GenerateOptions) -> Path | None:
    """Return the plan's file, if it is one and not the word of a planner."""
    return None if str(request.plan) in PLANNERS else request.plan


def run_generate(request: GenerateOptions, grammar: Grammar | None = None) -> int:
    """Carry out the request and print; return the exit code: 0, or 130 after Ctrl-C with nothing lost."""
    as_json, quiet, compared = request.as_json, request.quiet, request.compare
    if not request.prompt:
        raise InvalidParameter("The prompt is empty: give at least one character.")
    drafter = drafter_name(request)
    options = check_request(request, drafter)
    notes = notes_beside(request)
    refuse_clashes(
        (compared and quiet, "--compare measures what --quiet does not print: leave one of them out."),
        (
            compared and drafter == "none",
            "--compare has nothing to compare with --drafter none: leave one of them out.",
        ),
        idle_filters(request.sampling),
    )
    file = plan_file(request)
    plan = load_plan(file) if file else None
    with notes.status("Loading the models ..."):
        pair = load_pair_of(request)
    ids = encode(pair, as_asked(Prompt("", "", request.prompt), request.chat_template))
    options["drafter"] = drafter_of(drafter, pair, request)
    options |= text_options(request, grammar, pair)
    try:
        options |= planned_options(request, plan, pair, ids, options, notes) if plan else {}
        if request.compiled:
            with compiling(notes):
                warm_up(stream(pair.target, ids, **options))
    except KeyboardInterrupt:
        return stopped()
    run = stream(pair.target, ids, time=True, **options)
    console = new_console(quiet=as_json)
    shown = f"{request.prompt}\n\n" if request.chat_template else request.prompt
    interrupted = _show(console, run, pair, "" if quiet else shown)
    comparison = None
    if compared and not interrupted:
        comparison, interrupted = _compared(pair, ids, options, notes)
    if interrupted:
        stopped("the text that was written is printed")
    if as_json:
        print_json_line(_as_json(request, grammar, run, pair, comparison, interrupted))
    elif not quiet:
        print_run(console, run, comparison)
    return INTERRUPTED if interrupted else 0


def check_request(request: GenerateOptions, drafter: str) -> dict[str, Any]:
    """Check what can be checked before models are loaded, and return the generation options.

    Raises:
        InvalidParameter: a malformed tree, an unknown verifier, a sampling option outside its range.
        StoreError: the drafter's store cannot be used.
    """
    check_keywords(Sampling, request.sampling)
    refuse_clashes(*_clashes(request, drafter))
    if drafter_line(drafter).arguments_in(drafter):
        drafter_line(drafter).named(drafter)
    verifier = verifier_by_name(request.verifier, drafter, request.scheme, bottom_up=request.bottom_up)
    if verifier is not None:
        require_greedy(verifier, request.temperature)
    options: dict[str, Any] = {
        **request.sampling,
        "compile": request.compiled,
        "max_new_tokens": request.max_new_tokens,
        "seed": request.seed,
        "verifier": verifier,
        "policy": _policy(request),
    }
    return options


def text_options(request: GenerateOptions, grammar: Grammar | None, pair: Pair) -> dict[str, Any]:
    """Return the options for which the tokenizer is needed: where the text stops, and what it is to be."""
    stops = {"stop_strings": list(request.stop)} if request.stop else {}
    guide = {"grammar": grammar} if grammar else {}
    return {**stops, **guide, "tokenizer": pair.tokenizer} if stops or guide else {}


def _clashes(request: GenerateOptions, drafter: str) -> Iterator[tuple[object, str]]:
    """Yield the combinations in which an option could have no effect, each with its sentence."""
    one, auto, file = request, str(request.plan) in PLANNERS, plan_file(request)
    yield one.draft and not one.target, LONE_DRAFT
    yield one.tree in PLANNERS, f"--tree {one.tree} is no tree but a planner: write --plan {one.tree}."
    meant = near(str(file), PLANNERS)
    yield file and meant and not file.exists(), f"There is no plan {file} (did you mean {meant}?)."
    chosen = one.tree is not None or drafter == "none"
    yield auto and chosen, f"--plan {one.plan} chooses the tree of every step; leave --tree and --drafter none out."
    chosen = one.tree is not None or one.drafter is not None
    yield file and chosen, "--plan chooses the drafter and the tree; leave --drafter and --tree out."
    lone = drafter != "model" or (one.target is not None and one.draft is None)
    yield file and lone, "--plan is for a target and a draft model: give --draft too."
    yield one.compiled and one.plan, "--compile is for one tree; leave --plan out."
    yield one.compiled and one.parallel, "--compile is for a target on one device; leave --parallel out."
    unused = one.draft and not drafter_line(drafter).models
    yield unused, f"--drafter {drafter} does not use a draft model; leave --draft out."
    drafting = {"--tree": one.tree is not None, "--verifier": one.verifier != "auto"}
    for name, given in {**drafting, "--scheme": one.scheme, "--bottom-up": one.bottom_up}.items():
        yield given and drafter == "none", f"--drafter none drafts nothing; leave {name} out."


def _policy(request: GenerateOptions) -> TreePolicy | None:
    if request.tree is not None:
        return parse_policy(request.tree)
    planner = PLANNERS.get(str(request.plan))
    return planner() if planner else None


def load_pair_of(options: ModelOptions, load_named: Callable[..., Pair] | None = None) -> Pair:
    """Load the models that options name, by `load` unless told otherwise; without a target the embedded pair.

    Raises:
        SystemExit: torchrun has started this process for another rank than the first, and that has ended.
    """
    kept: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "weights": options.weights}
    spread = ("parallel", "draft_device") if isinstance(options, GenerateOptions) else ()  # others have no such options
    own = {name: getattr(options, name) for name in spread if getattr(options, name) is not None}
    if options.target is None and not own:
        return load_pair(**kept)
    named = (options.target, options.draft) if options.target else ("pair", "pair-draft")
    return (load_named or load)(*named, **kept, **own)


def named_draft(target: str | None, draft: str | None, parallel: str | None = None) -> str | None:
    """Return what the draft is called in results; None where neither a model nor a head drafts."""
    if draft is not None or target is None:
        return draft or "embedded pair"
    if parallel is not None:  # no head reads a target that several ranks share
        return None
    if shipped_head(target) is not None:
        return "shipped head"
    inside = drafts_inside(target)
    return f"its own {inside}" if inside else None


def _draft_used(request: GenerateOptions) -> str | None:
    line = drafter_line(drafter_name(request))
    return named_draft(request.target, request.draft, request.parallel) if line.models else None


def drafter_name(request: GenerateOptions) -> str:
    """Return the name of the drafter that the request means.

    Raises:
        InvalidParameter: it means a draft model and names none.
    """
    has_model = named_draft(request.target, request.draft, request.parallel) is not None
    if request.drafter and drafter_line(request.drafter).models and not has_model:
        raise InvalidParameter(DRAFTLESS.format(request.drafter))
    usual = text_word(SamplingParams(request.sampling.get("temperature") or 0.0))
    return request.drafter or ("model" if has_model else usual)


def drafter_of(name: str, pair: Pair, request: GenerateOptions) -> Drafter:
    """Return the drafter with a name; where none was named and a model drafts, what the engine takes by default."""
    line, params = drafter_line(name), SamplingParams(request.sampling.get("temperature") or 0.0)
    if line.models and pair.draft is None:  # a target's own masks that have no room, of which a warning told
        if request.drafter is not None:
            raise InvalidParameter(DRAFTLESS.format(request.drafter))
        name = text_word(params)
        line = drafter_line(name)
    if not line.models or pair.draft is None:
        return line.named(name)
    drafter = as_drafter(pair.draft, compile=request.compiled)
    if request.drafter is not None:
        return line.of(drafter)
    planner = None if request.plan is None else _policy(request)
    weighs = isinstance(planner, LearningPolicy) and planner.weighs_lookups
    chosen = request.plan is not None and not weighs
    fixed = request.compiled or request.tree is not None or chosen
    return default_drafter(drafter, params, pair.target.device, fixed=fixed)


@contextmanager
def compiling(notes: Console) -> Iterator[None]:
    """Say that passes are being compiled, and how long it took."""
    begin = time.perf_counter()
    with notes.status("Compiling the models' passes: seconds to a minute each, once ..."):
        yield
    notes.print(f"Compiled in {time.perf_counter() - begin:.0f} s.", highlight=False)


def warm_up(run: Run) -> None:
    """Take the steps after which every shape has been compiled, and drop their text."""
    for _ in islice(run, WARM_UP_STEPS):
        pass


def planned_options(
    request: GenerateOptions, plan: PairPlan, pair: Pair, ids: Tensor, options: dict[str, Any], notes: Console
) -> dict[str, Any]:
    """Return drafter, verifier and tree by the plan; where it does not fit, say why and measure again."""
    names = (request.target or "embedded pair's target", request.draft or "embedded pair's draft")
    temperature = request.sampling.get("temperature", 0.0)
    with warnings_as_sentences(), notes.status("Reading the plan ..."):
        chosen = planned(plan, pair, ids, temperature, verifier=options["verifier"], names=names)
    if not proposes(chosen["drafter"]):
        notes.print("By the plan plain decoding is fastest at this temperature.")
    return chosen


def _show(console: Console, run: Run, pair: Pair, prompt: str) -> bool:
    decoder = StreamDecoder(pair.tokenizer)
    write_text(console, prompt, "dim")
    try:
        for block in run:
            gained = block.rows[0]
            for place, token in enumerate(gained.tokens):
                write_text(console, decoder.add(token), DRAFTED if place < gained.accepted else OWN)
    except KeyboardInterrupt:
        return True
    finally:
        write_text(console, decoder.rest() + "\n", OWN)
    return False


def write_text(console: Console, text: str, style: str) -> None:
    """Write text in a colour on a terminal, and byte for byte into a pipe: rich would expand tabs there too."""
    if console.is_terminal:
        console.out(visible(text), style=style, end="", highlight=False)
    elif not console.quiet:
        console.file.write(text)


def _compared(pair: Pair, ids: Tensor, options: dict[str, Any], notes: Console) -> tuple[Comparison | None, bool]:
    fixed = {**options, "seed": options["seed"] if options["seed"] is not None else 0}
    with progress_bar(notes) as bar:
        task = bar.add_task("Comparing with plain decoding", total=COMPARE_REPEATS)

        def note(plain: Run, drafted: Run) -> None:
            bar.advance(task)

        try:
            return compare(pair.target, [ids], repeats=COMPARE_REPEATS, on_pair=note, **fixed), False
        except KeyboardInterrupt:
            return None, True


def _as_json(
    request: GenerateOptions,
    grammar: Grammar | None,
    run: Run,
    pair: Pair,
    comparison: Comparison | None,
    interrupted: bool,
) -> dict[str, object]:
    tokens = run.new_tokens[0]
    return {
        "prompt": request.prompt,
        "text": text_of(pair.tokenizer, tokens),
        "tokens": tokens,
        "finish": "interrupted" if interrupted else run.finish[0],
        "settings": {
            "target": request.target or "embedded pair",
            "draft": _draft_used(request),
            "seed": request.seed,
            "max_new_tokens": request.max_new_tokens,
            "plan": str(request.plan) if request.plan else None,
            **({} if request.chat_template is None else {"chat_template": request.chat_template}),
            **request.sampling,
            **({} if grammar is None else grammar.told),
            **describe_setup(run),
        },
        "statistics": run.statistics.as_dict(),
        "compare": comparison.as_dict() if comparison else None,
    }
