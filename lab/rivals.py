"""Measure polydraft beside other tools on a CPU, and write the tables of docs/rivals.md.

    python lab/rivals.py --model ~/.cache/polydraft/smollm2 --work FOLDER

Tools are installed in the folder, and records stay there in rivals.jsonl, so that a run goes on where it stopped. All
are loaded at once, SmolLM2 in 14 GB, and write by turns. What is done for each stands in docs/rivals.
"""

import argparse
import os
import sys
from pathlib import Path

from polydraft import load
from polydraft.bench.prompts import read_prompts
from polydraft.bench.prompts.prompt import encode
from polydraft.fetched import MODELS, place
from polydraft.planning.plan import processor_name

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "rivals"))
from installing import WEIGHTS  # pyright: ignore[reportMissingImports]
from make import read, write_page  # pyright: ignore[reportMissingImports]
from processes import measure  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda path: Path(path).expanduser().resolve(), required=True)
    parser.add_argument("--work", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument("--prompts", default="spec-bench-mini", help="a file, or a set that ships")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS), metavar="NAME")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.records = given.work / "rivals.jsonl"
    given.name = next((one for one in MODELS if place(one).resolve() == given.model), str(given.model))
    pair = load(given.model)
    prompts = [encode(pair, one)[0].tolist() for one in read_prompts(given.prompts)[: given.limit]]
    told = {name: getattr(given, name) for name in ("limit", "max_new_tokens", "threads")}
    told |= {"model": given.name if given.name in MODELS else given.model.name, "prompts": Path(given.prompts).name}
    told |= {"lengths": [*map(len, prompts)], "processor": processor_name(), "cores": os.cpu_count()}
    del pair  # its memory is the tools'
    measure(given, prompts, told)
    print(write_page(read(given.records)))


if __name__ == "__main__":
    main()
