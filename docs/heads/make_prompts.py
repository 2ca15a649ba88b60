"""Make prompts behind which a target writes the text that its draft head learns from.

    python docs/heads/make_prompts.py prompts.jsonl novel.txt another.txt
    python docs/heads/make_prompts.py prompts.jsonl --kinds code

Prose comes from the text files that are given, such as novels in the public domain, and code from the standard library
of the Python that runs this. Every row says its kind as its category: texts to continue, beginnings of a user's turn,
and tasks, which go through the target's chat template. The same files, numbers and seed give the same prompts.
"""

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Sources = tuple[list[str], list[str]]
"""Paragraphs of prose, and files of code."""
Maker = Callable[[random.Random, Sources], dict[str, Any]]

LANGUAGES = ("German", "French", "Spanish", "Italian", "Dutch", "Polish")
TOPICS = (
    *("photosynthesis", "the water cycle", "compound interest", "the printing press", "black holes", "vaccines"),
    *("the French Revolution", "how a bicycle stays upright", "recycling", "inflation", "the immune system", "tides"),
    *("a good night's sleep", "learning a language", "public libraries", "chess openings", "bread baking", "hiking"),
    *("remote work", "gardening in a small flat", "the silk road", "volcanoes", "jazz", "how batteries work"),
)
TURN = "<|im_start|>user\n"
"""How a user's turn begins in ChatML; behind it a target writes an instruction, and then answers it."""
OPENINGS = (
    *("Write", "Explain", "What is", "How do I", "Give me", "Can you", "Describe", "Why does", "List", "Compare"),
    *("Summarize", "Translate", "Help me", "Tell me about", "Create", "Suggest", "In which", "Is it true that"),
)
TRANSLATIONS = (
    "Translate the following text into {language}:\n\n{prose}",
    "{prose}\n\nWhat is this in {language}?",
    "Give a {language} translation of this passage: {prose}",
)
SUMMARIES = (
    "Summarize the following passage in two sentences.\n\n{prose}",
    "{prose}\n\nSum this up briefly.",
    "What are the main points of this text?\n\n{prose}",
)
READINGS = (
    "Read this passage and answer: who is speaking, and about what?\n\n{prose}",
    "{prose}\n\nHow does the author feel about this? Give evidence from the text.",
    "Write three questions that this text answers, with their answers.\n\n{prose}",
    "Rewrite this passage in plain modern English:\n\n{prose}",
)
CODING = (
    "Explain what this Python code does:\n\n```python\n{code}\n```",
    "Add a docstring and type hints to this code:\n\n```python\n{code}\n```",
    "Write a unit test for the following code.\n\n```python\n{code}\n```",
    "Is there a mistake in this code? Mend it if there is.\n\n```python\n{code}\n```",
)
GENERAL = (
    "Explain {topic} to a child of ten.",
    "Write a short article about {topic}.",
    "What are common mistakes people make about {topic}?",
    "Give me five tips about {topic}.",
    "Write a dialogue of two friends who talk about {topic}.",
)
SUMS = (
    "A shop sells {a} boxes of {b} apples each, and {c} apples are bad. How many good apples are there?",
    "Anna has {a} coins. She gets {b} more every day for {c} days. How many does she have then?",
    "What is {a} * {b} - {c}? Explain every step.",
    "A train goes {a} kilometres an hour for {b} hours, then {c} kilometres more. How far does it go?",
)


def paragraphs(text: str, least: int = 30) -> list[str]:
    """Return a text's paragraphs of at least so many words, each in one line."""
    joined = (" ".join(one.split()) for one in text.replace("\r\n", "\n").split("\n\n"))
    return [one for one in joined if len(one.split()) >= least]


def library() -> list[str]:
    """Return the modules of the standard library, without tests and what was installed beside it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = (one for one in sorted(folder.rglob("*.py")) if not left_out & {*one.relative_to(folder).parts})
    texts = (one.read_text(encoding="utf-8", errors="ignore") for one in files)
    return [one for one in texts if len(one) > 1000]


def some_prose(chance: random.Random, sources: Sources, least: int, most: int) -> str:
    """Return the beginning of a paragraph."""
    words = chance.choice(sources[0]).split()
    return " ".join(words[: chance.randint(least, most)])


def some_code(chance: random.Random, sources: Sources, least: int, most: int) -> str:
    """Return consecutive lines of a module, of so many characters or few more."""
    lines = chance.choice(sources[1]).splitlines()
    length, first = chance.randint(least, most), chance.randrange(max(1, len(lines) // 2))
    found = list[str]()
    for line in lines[first:]:
        if sum(map(len, found)) >= length:
            break
        found.append(line)
    return "\n".join(found).strip("\n")


def beginning(chance: random.Random, sources: Sources) -> dict[str, Any]:
    """Return the beginning of a module, some 24 to 160 tokens."""
    text = chance.choice(sources[1])
    cut = chance.randint(80, 600)
    return {"text": text[: max(text.rfind("\n", 0, cut), 80)]}


def asked(templates: Sequence[str]) -> Maker:
    """Return a maker of tasks by templates."""

    def make(chance: random.Random, sources: Sources) -> dict[str, Any]:
        template = chance.choice(templates)
        filled = template.format(
            prose=some_prose(chance, sources, 25, 110) if "{prose}" in template else "",
            code=some_code(chance, sources, 150, 500) if "{code}" in template else "",
            language=chance.choice(LANGUAGES),
            topic=chance.choice(TOPICS),
            a=chance.randint(3, 90),
            b=chance.randint(2, 40),
            c=chance.randint(1, 30),
        )
        return {"messages": [{"role": "user", "content": filled}]}

    return make


KINDS: dict[str, Maker] = {
    "prose": lambda chance, sources: {"text": some_prose(chance, sources, 20, 90)},
    "code": beginning,
    "turns": lambda chance, sources: {"text": TURN + chance.choice(OPENINGS)},
    "translations": asked(TRANSLATIONS),
    "summaries": asked(SUMMARIES),
    "readings": asked(READINGS),
    "coding": asked(CODING),
    "general": asked(GENERAL),
    "sums": asked(SUMS),
}
"""The kinds of prompts; the first three are raw texts, and what begins a turn needs `--past-end`."""
FROM_PROSE = ("prose", "translations", "summaries", "readings")
FROM_CODE = ("code", "coding")


def rows(kinds: Sequence[str], count: int, sources: Sources, seed: int) -> Iterator[dict[str, Any]]:
    """Yield so many prompts of every kind, in turn; none twice, so that kinds of few come to an end early."""
    chances = {kind: random.Random(f"{seed} {kind}") for kind in kinds}
    seen = set[str]()
    for number in range(count):
        for kind in kinds:
            row = KINDS[kind](chances[kind], sources)
            said = json.dumps(row)
            if said not in seen:
                seen.add(said)
                yield {"id": f"{kind}-{number}", "category": kind, **row}


def sources_of(files: Sequence[Path], kinds: Sequence[str]) -> Sources:
    """Read what the kinds need.

    Raises:
        SystemExit: a file cannot be read, or a kind has nothing to be made of.
    """
    try:
        prose = [one for file in files for one in paragraphs(file.read_text(encoding="utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"A text cannot be read: {error}.") from error
    wanted = [kind for kind in kinds if kind in FROM_PROSE]
    if wanted and not prose:
        raise SystemExit(
            f"The kinds {', '.join(wanted)} need prose: give text files with paragraphs of 30 words or more, or leave "
            "these kinds out (--kinds)."
        )
    return prose, library() if {*kinds} & {*FROM_CODE} else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the prompts that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the file of prompts, JSON lines")
    parser.add_argument("files", type=Path, nargs="*", help="texts in prose, paragraphs between blank lines")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="default: all")
    parser.add_argument("--count", type=int, default=800, help="prompts of every kind")
    parser.add_argument("--seed", type=int, default=1, help="of what is chosen")
    given = parser.parse_intermixed_args(arguments)
    if given.count < 1:
        raise SystemExit(f"--count must be at least 1, but is {given.count}.")
    made = [*rows(given.kinds, given.count, sources_of(given.files, given.kinds), given.seed)]
    given.out.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    sys.stdout.write(f"{len(made)} prompts of {len(given.kinds)} kinds: {given.out}\n")


if __name__ == "__main__":
    main()
