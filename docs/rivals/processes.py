"""Tools in processes of their own, loaded and warm: they are asked for texts by turns, and answers become records."""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

from adapters import ARMS
from installing import INSTALL, LLAMA, WEIGHTS, Missing, Place, surroundings
from make import key_of, read

ADAPTERS = Path(__file__).with_name("adapters.py")
WARM = 16
"""New tokens of each text that is written before any is measured."""


class Tool:
    """A tool with its model loaded.

    Args:
        work: the folder in which tools are installed.
        model: the model's folder.
        threads: how many threads it may use.
        name: what polydraft knows the model by: a word, whose draft head it then takes, or the folder.

    Raises:
        Missing: it cannot be installed, or does not load.
    """

    def __init__(self, tool: str, weights: str, work: Path, model: Path, threads: int, name: str) -> None:
        python, folder = INSTALL[tool](Place(work / tool, model), weights)
        ours = tool == "polydraft"
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)} if ours else {}
        command = (python, ADAPTERS, tool, weights, name if ours else folder, threads)
        with (work / f"{tool}-{weights}.log").open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=surroundings(threads) | paths,
            )
        self.versions = self.answer() or dict([LLAMA.partition("==")[::2]])

    def answer(self) -> dict[str, Any]:
        """Return what it tells next.

        Raises:
            Missing: its process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Missing(f"its process ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, arm: str, temperature: float, ids: Sequence[int], new: int, seed: int) -> dict[str, Any]:
        """Let it write a text.

        Raises:
            Missing: its process has ended.
        """
        asked = {"arm": arm, "temperature": temperature, "ids": ids, "new": new, "seed": seed}
        assert self.process.stdin is not None
        try:
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Missing(f"its process ended with {self.process.wait()}") from None
        return self.answer()

    def warm(self, ids: Sequence[int], temperatures: Sequence[float]) -> None:
        """Let it write some tokens in every way."""
        for temperature in temperatures:
            for arm in ARMS:
                self.ask(arm, temperature, ids, WARM, 0)

    def record(self, cell: Sequence[Any], number: int, ids: Sequence[int], new: int) -> dict[str, Any]:
        """Return what it tells of a text of a tool, its weights, a temperature and an arm; the number is the seed."""
        tool, weights, temperature, arm = cell
        told = self.ask(arm, temperature, ids, new, number)
        return {
            "tool": tool,
            "weights": weights,
            "temperature": temperature,
            "arm": arm,
            "prompt": number,
            "new_tokens": len(told["tokens"]),
            "seconds": told["seconds"],
            "first": told["first"],
            "mark": f"{crc32(json.dumps(told['tokens']).encode()):08x}",
            "load": round(os.getloadavg()[0], 2),
            "date": str(date.today()),
        }

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(given: argparse.Namespace, prompts: Sequence[Sequence[int]], told: dict[str, Any]) -> None:
    """Write every text that is not there yet; a tool that cannot be loaded is left out, and the records say why.

    All tools are loaded, and take turns prompt by prompt, in an order of chance.
    """
    before = read(given.records)
    if any(one.get("conditions", told) != told for one in before):
        raise SystemExit(f"The records in {given.records} have other conditions: name another folder.")
    done, kinds = {*map(key_of, before)}, [(tool, weights) for tool in given.only for weights in WEIGHTS[tool]]
    keys = [(*kind, *way) for kind in kinds for way in product(given.temperature, ARMS, range(len(prompts)))]
    left, tools = [one for one in keys if one not in done], dict[tuple[str, str], Tool]()
    given.records.write_text("".join(json.dumps(one) + "\n" for one in before))  # without a line that was cut off
    with given.records.open("a") as out:

        def note(**record: Any) -> None:
            print(json.dumps(record), file=out, flush=True)

        note(conditions=told)
        for tool, weights in dict.fromkeys(one[:2] for one in left):
            print(f"{tool} {weights}", flush=True)
            try:
                one = Tool(tool, weights, given.work, given.model, given.threads, given.name)
                one.warm(prompts[0], given.temperature)
            except Missing as error:
                note(missing=tool, weights=weights, why=str(error))
            else:
                tools[tool, weights] = one
                note(tool=tool, weights=weights, versions=one.versions)
        random.Random(0).shuffle(left)
        for *cell, number in sorted(left, key=lambda one: one[-1]):  # prompt by prompt, shuffled within
            if (one := tools.get((cell[0], cell[1]))) is not None:
                note(**one.record(cell, number, prompts[number], given.max_new_tokens))
    for one in tools.values():
        one.close()
