"""Calls of the command line made from the types of its options: odd values, odd files, odd combinations.

The commands and options are read from the application itself, so that a new one is tried without being named here. A
call is fixed by a seed and its number. It runs in a folder of its own, made anew, in which all paths are relative.
"""

import gzip
import inspect
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import typer

from polydraft.cli.commands import app

ODD_TEXTS = (
    *("", " ", "x", "[/]", "[bold", "[red]x[/red]", "\x1b[31mred", "\x9b31m", "\a\b\r", "\u202eabc", "é漢\U0001f600"),
    *(
        ":smile:",
        "$x^",
        "a" * 300,
        "-",
        "--",
        "=",
        "'",
        '"',
        "{}",
        "[]",
        "null",
        "0",
        "a\nb",
        "a\tb",
        "\udcff",
        "\ud800x",
    ),
    *(
        "~nosuchuser/x",
        "%s%n",
        "../..",
        "auto",
        "none",
        "no-such-org/no-such-model",
        "|",
        "a,b",
        "chain:5",
        "2,1",
        "0,0",
    ),
    *("chain:99999999999999999999", "best-first:0", "9" * 400, "1-1000", "1,1", "3-1", "meta", "cuda:77", "cpu:-1"),
    *("float32", "int8", "float8_e4m3fn", "tree=3 tree=4", "name=[/] tree=2", "hf-lookup tokens=0", "name=$x^ hf"),
    *("block", "Naive", "drafter=ngram", "plain", "name=plain", "hf-assisted threshold=nan", "humaneval", "python"),
)
ODD_INTS = (
    *("", "x", "-1", "0", "1", "2", "3", "8", "1.5", "1e3", "nan", "inf", "0x10", " 1", "\uff11", "True", "[bold"),
    *(str(2**31 - 1), str(2**31), str(2**62), str(2**63 - 1), str(2**63), "9" * 23, "-" + "9" * 23, "9" * 5000),
)
ODD_FLOATS = (
    *("", "x", "-1", "0", "-0.0", "0.5", "0.8", "1", "2", "nan", "-nan", "inf", "-inf", "1e400", "1e-400", "1e308"),
    *("1e-45", "\uff11", "0x1p3", "9" * 400, "[/]"),
)
PLACES = (
    *("", ".", "/", "..", "new.json", "new/deep/file", "folder", "folder/file", "folder/file/below", "fifo", "empty"),
    *("/dev/full", "/dev/null", "/dev/zero", "/dev/stdin", "/proc/self/mem", "~nosuchuser/x", "a" * 300, "dangling"),
    *(
        "binary",
        "five.jsonl",
        "deep.jsonl",
        "digits.jsonl",
        "odd.jsonl",
        "surrogate.jsonl",
        "nan.jsonl",
        "cut.jsonl.gz",
    ),
    *("prompts.jsonl", "prompts.txt", "plan.json", "runs.jsonl", "texts.jsonl", "limits", "[/].jsonl", "\x1b[1m.txt"),
    *("bad_prompts.jsonl", "bad_plan.json", "bad_runs.jsonl", "bad_texts.jsonl", "bad_limits", "target", "draft"),
    *("no_layers", "no_weights", "no_json", "wide", "half_work"),
)
ODD_JSON: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**400, 2**63, 1.5, -2.5, float("nan"), float("inf"), 1e308, "", "x", "\x1b[31m", "[/]"),
    *("\ud800", "é漢", "9" * 5000, [], [1], [[1]], [None], {}, {"a": 1}, {"": []}, [[[[]]]]),
)
Call = tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """What a parameter of a command takes; an argument has no flag."""

    flag: str
    kind: Any
    several: bool


def commands() -> dict[Call, list[Option]]:
    """Return all commands of the application with their parameters."""
    return dict(_commands(app, ()))


def _commands(group: typer.Typer, before: Call) -> Iterator[tuple[Call, list[Option]]]:
    for one in group.registered_commands:
        assert one.callback is not None
        yield (*before, one.name or one.callback.__name__), [*_options(one.callback)]
    for one in group.registered_groups:
        assert one.typer_instance is not None and one.name
        itself = one.typer_instance.registered_callback
        if itself is not None and itself.callback is not None:
            yield (*before, str(one.name)), [*_options(itself.callback)]
        yield from _commands(one.typer_instance, (*before, str(one.name)))


def _options(function: Any) -> Iterator[Option]:
    for name, parameter in inspect.signature(function).parameters.items():
        if not get_args(parameter.annotation):  # the context, which nobody gives
            continue
        hint, info = get_args(parameter.annotation)
        kinds = [one for one in get_args(hint) if one is not type(None)] if _is_union(hint) else [hint]
        several = get_origin(kinds[0]) is list
        given = (info.default, *(info.param_decls or ()))  # in an annotation the first name stands for a default
        declared = [one for one in given if isinstance(one, str) and one.startswith("--")]
        flag = declared[0] if declared else f"--{name.replace('_', '-')}"
        argument = isinstance(info, type(typer.Argument()))
        yield Option("" if argument else flag, get_args(kinds[0])[0] if several else kinds[0], several)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def odd_values(kind: Any) -> tuple[str, ...]:
    """Return odd values of a type, as the command line has them."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (*(str(one.value) for one in kind), "", "magic", "[bold", "\x1b[31m", "NONE")
    pools = {int: ODD_INTS, float: ODD_FLOATS, Path: PLACES, str: (*ODD_TEXTS, *PLACES)}
    return pools[kind]


BASES: dict[Call, tuple[str, ...]] = {
    ("generate",): ("--max-new-tokens", "3"),
    ("chat",): ("--max-new-tokens", "3"),
    ("demo",): ("--max-new-tokens", "8", "--repeats", "1"),
    ("conformance",): ("--quick",),
    ("limits",): ("--max-tokens", "3", "--k", "1-2", "--tree-every", "0", "--shortlist", "8", "--limit", "1"),
    ("tune",): ("--max-tokens", "3", "--max-nodes", "4", "--max-depth", "2", "--limit", "1"),
    ("bench",): ("--max-new-tokens", "3", "--limit", "1"),
    ("bench", "passes"): ("--known", "4", "--width", "2", "--repeats", "1"),
    ("bench", "rules"): (
        *("--max-tokens", "3", "--limit", "1", "--shortlist", "8", "--vocabulary", "50", "--tree", "2"),
        *("--verifier", "naive", "--scheme", "iid"),
    ),
    ("bench", "planner"): ("--max-new-tokens", "3", "--limit", "1", "--repeats", "1", "--setting", "1.5"),
}
"""Settings that keep a call that is good after all short; what is drawn comes later, and may replace them."""
STARTS: dict[Call, tuple[tuple[str, ...], ...]] = {
    ("generate",): (
        ("def add",),
        ("def add", "--target", "target", "--draft", "draft"),
        ("def add", "--target", "target", "--temperature", "0.8"),
        ("--input", "prompts.jsonl", "--output", "new.jsonl"),
        ("--input", "bad_prompts.jsonl", "--output", "new.jsonl"),
        ("--input", "prompts.jsonl", "--output", "bad_texts.jsonl"),
        ("def add", "--target", "target", "--draft", "draft", "--plan", "bad_plan.json"),
        ("def add", "--target", "no_layers"),
    ),
    ("chat",): (
        ("--target", "chat", "--input", "messages.jsonl"),
        ("--target", "chat", "--input", "messages.jsonl", "--temperature", "0.8"),
        ("--target", "chat", "--input", "prompts.txt", "--draft", "chat"),
        ("--target", "chat", "--input", "bad_messages.jsonl"),
        ("--target", "target"),
    ),
    ("limits",): (
        ("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl", "--temperature", "0.7"),
        ("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl", "--out", "bad_limits"),
        ("--prompts", "odd.jsonl", "--temperature", "0"),
    ),
    ("tune",): (("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl"), ("--prompts", "odd.jsonl")),
    ("bench",): (
        ("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl", "--temperature", "0"),
        ("--prompts", "odd.jsonl", "--temperature", "0", "--arm", "name=[/] tree=2"),
        (
            *("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl", "--temperature", "0"),
            *("--arm", "default", "--out", "bad_runs.jsonl"),
        ),
    ),
    ("bench", "passes"): (("--target", "target", "--draft", "draft"), ("--target", "target", "--draft", "self:skip=0")),
    ("bench", "rules"): (("--target", "target", "--draft", "draft", "--prompts", "prompts.jsonl"), ("--bottom-up",)),
    ("bench", "planner"): (("--target", "target", "--draft", "draft", "--prompts", "odd.jsonl"), ("--fresh",)),
    ("report",): (("bad_runs.jsonl",), ("runs.jsonl",), ("bad_runs.jsonl", "--out", "page")),
    ("train", "pair"): (("--out", "new", "--work", "work"), ("--out", "new", "--work", "half_work")),
    ("train", "head"): (
        ("eagle-3", "--target", "target", "--prompts", "prompts.jsonl", "--out", "new"),
        ("mixing", "--prompts", "odd.jsonl", "--out", "new", "--work", "work"),
    ),
}
"""Beginnings from which a call gets further than to its first mistake."""


def generated_call(seed: int, number: int) -> Call:
    """Return a call: a command, a beginning, and up to four of its parameters with odd values."""
    draw = random.Random(f"{seed} {number} call")
    everything = commands()
    command = draw.choice([*everything, ("generate",), ("generate",), ("bench",), ("report",)])
    starts = STARTS.get(command, ((),))
    words = [*BASES.get(command, ()), *(draw.choice(starts) if draw.random() < 0.8 else ())]
    options = everything[command]
    for option in draw.sample(options, min(len(options), draw.choice((0, 1, 1, 1, 2, 2, 3, 4)))):
        for _ in range(draw.choice((1, 1, 2)) if option.several else 1):
            words += _given(option, draw)
    return (*command, *words)


def _given(option: Option, draw: random.Random) -> list[str]:
    if option.kind is bool:
        return [option.flag]
    value = draw.choice(odd_values(option.kind))
    if not option.flag:
        return [value]
    return [f"{option.flag}={value}"] if draw.random() < 0.4 or value.startswith("-") else [option.flag, value]


@dataclass(frozen=True)
class Good:
    """Whole files of every kind, from which damaged ones are made, and the model folders."""

    target: Path
    draft: Path
    chat: Path
    plan: bytes
    runs: bytes
    texts: bytes
    limits: bytes


def make_world(place: Path, good: Good, seed: int, number: int) -> None:
    """Fill a folder with files of all kinds, some of them damaged by chance."""
    draw = random.Random(f"{seed} {number} world")
    rows = [{"id": "a", "prompt": "def add"}, {"id": "b", "prompt": "class Point", "temperature": 0.5, "seed": 3}]
    prompts = "".join(json.dumps(row) + "\n" for row in rows).encode()
    odd = {"category": "[/]\x1b[31m$x^", "id": "[bold\a", "prompt": "def \x1b[2J\x9b add [/]"}
    files = {
        "empty": b"",
        "binary": bytes(range(256)) * 4,
        "five.jsonl": b"5\n",
        "deep.jsonl": b"[" * 100_000,
        "digits.jsonl": b'{"prompt": "x", "temperature": ' + b"9" * 400 + b', "id": ' + b"9" * 400 + b"}\n",
        "odd.jsonl": json.dumps(odd).encode() + b"\n",
        "surrogate.jsonl": b'{"prompt": "x", "id": "\\ud800", "category": "\\udfff"}\n',
        "nan.jsonl": b'{"prompt": "x", "temperature": NaN, "seed": Infinity}\n',
        "cut.jsonl.gz": gzip.compress(prompts)[:-9],
        "prompts.jsonl": prompts,
        "prompts.txt": b"def add\n\nclass Point\n",
        "plan.json": good.plan,
        "runs.jsonl": good.runs,
        "texts.jsonl": good.texts,
        "limits/limits.jsonl": good.limits,
        "[/].jsonl": prompts,
        "\x1b[1m.txt": b"def add\n",
        "bad_prompts.jsonl": damaged(prompts, draw),
        "bad_plan.json": damaged(good.plan, draw),
        "bad_runs.jsonl": damaged(good.runs, draw),
        "bad_texts.jsonl": damaged(good.texts, draw),
        "bad_limits/limits.jsonl": damaged(good.limits, draw),
        "folder/file": b"x",
        "no_json/config.json": b"{",
        "half_work/corpus.json": b"{}",
        **_damaged_models(good.target),
    }
    messages = b'{"content": "How many?"}\n{"role": "user", "content": "And [/] \\u001b[2J then?"}\n'
    files |= {"messages.jsonl": messages, "bad_messages.jsonl": damaged(messages, draw)}
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    os.mkfifo(place / "fifo")
    for name, to in (
        ("target", good.target),
        ("draft", good.draft),
        ("chat", good.chat),
        ("dangling", place / "nothing"),
    ):
        (place / name).symlink_to(to)


def _damaged_models(target: Path) -> dict[str, bytes]:
    config = json.loads((target / "config.json").read_text())
    kept = {name: (target / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    changes = {"no_layers": {"num_hidden_layers": -1}, "no_weights": {}, "wide": {"hidden_size": 10**6}}
    folders = {name: {"config.json": json.dumps(config | change).encode(), **kept} for name, change in changes.items()}
    return {f"{folder}/{name}": content for folder, files in folders.items() for name, content in files.items()}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return a file with something wrong: cut, mixed up, or a value of its JSON replaced, dropped or wrapped."""
    if draw.random() < 0.15:
        before, after = content[: (place := draw.randrange(len(content) + 1))], content[place:]
        return draw.choice((before, before + b"\xff\xfe\x00" + after, content[::-1], b"\x00" * 100, b"\n" * 5))
    several = content.startswith(b'{"') and content.count(b"\n") > 1
    lines = content.decode().splitlines() if several else [content.decode()]
    number = draw.randrange(len(lines))
    try:
        row = json.loads(lines[number])
    except ValueError:
        lines, row = [content.decode()], json.loads(content)
        number = 0
    for _ in range(draw.choice((1, 1, 2))):
        row = changed(row, draw)
    lines[number] = json.dumps(row)
    return ("\n".join(lines) + "\n").encode()


def changed(row: Any, draw: random.Random) -> Any:
    """Return JSON with one value changed, any of them with equal chance at each depth."""
    if isinstance(row, dict | list) and row and draw.random() < 0.85:
        keys = [*row] if isinstance(row, dict) else [*range(len(row))]
        key = draw.choice(keys)
        copy = dict(row) if isinstance(row, dict) else list(row)
        if draw.random() < 0.12:
            del copy[key]  # type: ignore[arg-type]
        else:
            copy[key] = changed(copy[key], draw)  # type: ignore[index]
        return copy
    if isinstance(row, dict) and draw.random() < 0.2:
        return {**row, "unknown": 1}
    return [row] if draw.random() < 0.1 else draw.choice(ODD_JSON)
