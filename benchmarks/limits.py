"""Measure the embedded pair's gap to the optimum on the shipped prompts, and put tables and figures into docs.

    python benchmarks/limits.py                                  # everything; an interrupted run goes on
    python benchmarks/limits.py --limit 1 --max-tokens 8 --out /tmp/limits --records /tmp/records    # a quick look

The records stay in runs/limits; docs/theory/limits gets tables.md and the figures, among them one without models: an
alphabet of three tokens, after arXiv 2410.18234, figure 2.
"""

import argparse
import shutil
import sys
from pathlib import Path

from polydraft.bench import Plan
from polydraft.bench.limits.three_tokens import draw_three_tokens
from polydraft.bench.style import save
from polydraft.cli.limits import LimitsRequest, parse_numbers, run_limits

ROOT = Path(__file__).parents[1]
THREE_TOKENS = """The same rules without models: two independent drafts of a uniform target over three tokens.

![three_tokens](three_tokens.svg)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=12, help="prompts of each of the two tasks")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.3, 0.6, 0.8, 1.0, 1.2])
    parser.add_argument("--k", default="1,2,3,4,6,8")
    parser.add_argument("--tree-every", type=int, default=8)
    parser.add_argument("--shortlist", type=int, default=1024)
    parser.add_argument("--records", type=Path, default=ROOT / "runs" / "limits")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "theory" / "limits")
    given = parser.parse_args()
    plan = Plan(
        temperatures=tuple(given.temperatures),
        drafts=parse_numbers(given.k),
        max_tokens=given.max_tokens,
        tree_every=given.tree_every,
        shortlist=given.shortlist,
    )
    code = run_limits(LimitsRequest(plan, limit=given.limit, out=given.records, figures=True), as_json=False)
    if code == 0:
        given.out.mkdir(parents=True, exist_ok=True)
        for path in given.records.glob("*.svg"):
            shutil.copy(path, given.out)
        save(draw_three_tokens, given.out / "three_tokens.svg")
        page = (given.records / "tables.md").read_text()
        (given.out / "tables.md").write_text(page + "\n" + THREE_TOKENS)
    return code


if __name__ == "__main__":
    sys.exit(main())
