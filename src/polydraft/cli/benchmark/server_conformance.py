"""`polydraft conformance --url`: whether a server writes as its model says; `--export` writes a model for that."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import counted, print_json_line, styled
from polydraft.cli.process import stopped
from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.engines import SampleRequest
from polydraft.conformance.http.served_tests import (
    LENGTH,
    PROMPTS,
    TOGETHER,
    ServerReport,
    ServerTest,
    check_copy,
    check_logprobs,
    check_tiny,
)
from polydraft.conformance.http.server_client import KEY, ServerClient
from polydraft.errors import InvalidParameter
from polydraft.models import export_tiny, load
from polydraft.options.commands.bench_options import ConformanceOptions
from polydraft.probs import SamplingParams

PATIENCE, LARGEST = 2.0, 1e300
OF_SERVERS: tuple[str, ...] = (
    *("model", "engine", "tiny", "copy", "draft", "trust_logprobs", "temperature", "top_p", "top_k"),
    *("false_alarm", "tolerance", "most_tokens", "chat"),
)
OF_RULES = ("rule", "drafter", "quick", "all_pairs")


def refuse_server_options(options: ConformanceOptions) -> None:
    """Refuse options that are for servers where none is named.

    Raises:
        InvalidParameter: one is given.
    """
    _refuse(options, OF_SERVERS, "is for a server, and none is named: give --url too")


def _refuse(options: ConformanceOptions, names: tuple[str, ...], said: str) -> None:
    usual = {one.name: one.default for one in fields(ConformanceOptions)}
    given = next((name for name in names if getattr(options, name) != usual[name]), None)
    if given is not None:
        raise InvalidParameter(f"--{given.replace('_', '-')} {said}.")


def run_server_conformance(options: ConformanceOptions) -> int:
    """Test a server, or write the tiny model, and print.

    Returns:
        the exit code: 0, 1 if the server deviates, 130 after Ctrl-C.

    Raises:
        InvalidParameter: options that do not go together.
        ServerError: the server cannot be tested, and why.
    """
    _refuse(options, OF_RULES, "is for rules: leave it out beside --url and --export")
    if options.export is not None:
        refuse_clashes((options.url, "--export writes a folder and --url tests a server: give one of them."))
        _refuse(options, OF_SERVERS, "is for a server, and --export only writes a folder: leave it out")
        return _export(options)
    _check_ways(options)
    try:
        return _tested(options)
    except KeyboardInterrupt:
        return stopped()


def _check_ways(options: ConformanceOptions) -> None:
    ways = [options.tiny is not None, options.copy is not None, options.trust_logprobs]
    refuse_clashes(
        (
            sum(ways) > 1,
            "--tiny, --copy and --trust-logprobs say differently what the texts should be: give one of them.",
        ),
        (
            not any(ways),
            "--url needs one of --tiny FOLDER, --copy MODEL and --trust-logprobs: what the texts should be.",
        ),
        (options.draft and options.copy is None, "--draft goes with --copy, whose texts may lean towards it."),
        (options.tiny and options.chat, "--tiny has no chat template: leave --chat out."),
        (options.tiny and options.tolerance is not None, "--tiny tests without a tolerance: leave --tolerance out."),
    )


def _export(options: ConformanceOptions) -> int:
    assert options.export is not None
    names = export_tiny(options.export)
    if options.as_json:
        print_json_line({"folder": str(options.export), "files": names})
        return 0
    shown = new_console()
    shown.print(styled(f"Wrote {', '.join(names)} to {options.export}.", "default"), soft_wrap=True)
    if not any(name.endswith(".gguf") for name in names):
        shown.print("Without the package gguf there is no file for llama.cpp and Ollama: pip install gguf.")
    said = f"Serve it in single precision (polydraft serve --target {options.export} --dtype float32), then: "
    said += f"polydraft conformance --url URL --tiny {options.export}"
    shown.print(styled(said, "default"), soft_wrap=True)
    return 0


def _tested(options: ConformanceOptions) -> int:
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    numbers = {name: getattr(options, name) for name in ("false_alarm", "tolerance", "most_tokens")}
    test = ServerTest(params=params, **{name: value for name, value in numbers.items() if value is not None})
    known = {"chat": options.chat, "key": os.environ.get(KEY)}
    client = ServerClient(str(options.url), options.model, options.engine, **known)
    try:
        with progress(new_console(errors=True, quiet=options.as_json)) as step:
            report = _report(options, client, test, step)
    finally:
        client.close()
    if options.as_json:
        told = json.dumps({"passed": report.passed, **asdict(report)})
        print_json_line(json.loads(told, parse_constant=lambda _: LARGEST))  # JSON has no infinity
    else:
        show_report(new_console(), report)
    return 0 if report.passed else 1


def _report(
    options: ConformanceOptions, client: ServerClient, test: ServerTest, step: "Callable[[str, int, int], None]"
) -> ServerReport:
    if options.trust_logprobs:
        count = min(TOGETHER, client.engine.most)
        said = PROMPTS[0] if options.chat else None
        asked = SampleRequest(client.model, (), PROMPTS[0], count, test.seed, LENGTH, message=said)
        return check_logprobs(client, asked, test, step)
    name = options.tiny or str(options.copy)
    pair = load(name, options.draft, dtype="float64" if options.tiny else "float32")
    draft = pair.draft if isinstance(pair.draft, torch.nn.Module) else None
    refuse_clashes(
        (options.draft and draft is None, f"--draft must be a model with passes of its own, not {options.draft}.")
    )
    copy = CopiedModel(pair.target, pair.tokenizer, draft, test.params)
    return (check_tiny if options.tiny else check_copy)(client, copy, test, step)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar and the time left on a terminal once the work takes over two seconds; gives what moves it."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    columns = (*columns, TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, start = bar.add_task(""), time.monotonic()

    def step(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)
        if time.monotonic() - start > PATIENCE:
            bar.start()

    try:
        yield step
    finally:
        bar.stop()


def show_report(console: Console, report: ServerReport) -> None:
    """Print what a test of a server found."""

    def say(text: str, style: str = "default") -> None:
        console.print(styled(text, style), soft_wrap=True)

    head = f"{report.model} at {report.url} ({report.engine}) {report.verdict}"
    say(f"{head}: {report.proves}.", "green" if report.passed else "red")
    say(
        f"{counted(report.texts, 'text')}, {counted(report.tokens, 'token')}, {report.lost} lost; e-value "
        f"{report.e_value:.3g} (deviates from {1 / report.false_alarm:.3g} on, false-alarm rate "
        f"{report.false_alarm:g}), tolerance {report.tolerance:.3g} a token."
    )
    for finding in report.findings:
        say(f"Found: {finding}.", "red")
    if report.law is not None:
        say(f"Law: {report.law}")
    culprit = report.culprit
    if culprit is not None and not report.passed:
        say(
            f"{culprit.feature}, {culprit.place}: {culprit.direction}, expected {culprit.expected:.3%}, observed "
            f"{culprit.observed:.3%} (e-value of this bet {culprit.e_value:.3g}). Tokens most unlike the law there: "
            + ", ".join(f"{one.text!r} ({one.expected:.1f} expected, {one.observed} seen)" for one in culprit.tokens)
            + "."
        )
    if report.passed and report.law is None:
        say(f"A feature's bias of {report.detectable:.3f} would have been seen with probability 0.95.")
    for note in report.notes:
        say(f"Note: {note}.")
