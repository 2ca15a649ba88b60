"""Measure the embedded pair's gap to the optimum on the shipped prompts, and put tables and figures into docs.

    python lab/make_limits.py                   # everything; an interrupted run goes on
    python lab/make_limits.py --limit 1 --max-tokens 8 --out quick --records quick/records    # a quick look

The records stay in runs/limits; docs/theory/limits gets tables.md and the figures, among them one without models: an
alphabet of three tokens, after arXiv 2410.18234, figure 2. The tables of docs/theory/limits.md, marked by comments with
their titles, are shortened from those of tables.md; its text is not.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

from polydraft.bench.style import save
from polydraft_lab.commands.options import LimitsOptions
from polydraft_lab.commands.run_limits import run_limits
from polydraft_lab.limits.three_tokens import draw_three_tokens

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "theory" / "limits"
RECORDS = ROOT / "runs" / "limits"
THREE_TOKENS = """The same rules without models: two independent drafts of a uniform target over three tokens.

![three_tokens](three_tokens.svg)
"""

MARKED = re.compile(r"(<!-- table: (?P<title>[^>]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
GAP = re.compile(r"^(?P<value>\d+\.\d) (?P<gap>-?\d+\.\d+)( ±.*)?$")
ACCEPTED = re.compile(r"^(?P<value>\d+\.\d\d) ±\d+\.\d\d(?P<best>\*?)( \(.*\))?$")


def with_tables(page: str, tables: str) -> str:
    """Put the marked tables of a page in anew, without intervals of gaps.

    Raises:
        KeyError: a marked title is that of no table.
    """
    found = dict(re.findall(r"\*\*([^*]+)\*\*\n\n((?:\|.*\n)+)", tables))
    return MARKED.sub(lambda mark: mark[1] + shortened(found[mark["title"]]) + mark[4], page)


def shortened(table: str) -> str:
    """Leave out the intervals of rules, which stand under their scheme."""
    head, rule, *lines = (line.strip("|").split("|") for line in table.splitlines())
    head[0] = " scheme, rule "
    rows = [[brief(cell.strip()) for cell in line] for line in lines]
    names = [row[0] if row[0].startswith("*") else f"&nbsp; {row[0]}" for row in rows]
    body = [" | ".join([name, *row[1:]]) for name, row in zip(names, rows, strict=True)]
    return "".join(f"|{line}|\n" for line in ["|".join(head), "|".join(rule), *(f" {line} " for line in body)])


def brief(cell: str) -> str:
    """Return a rule's acceptance with its gap, if there is any, or what it accepts of trees."""
    if node := GAP.match(cell):
        return node["value"] if float(node["gap"]) == 0 else f"{node['value']} ({float(node['gap']):.1f})"
    tree = ACCEPTED.match(cell)
    return tree["value"] + tree["best"] if tree else cell


def main() -> int:
    """Measure, and write the pages and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=12, help="prompts of each of the two tasks")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.3, 0.6, 0.8, 1.0, 1.2])
    parser.add_argument("--k", default="1,2,3,4,6,8")
    parser.add_argument("--tree-every", type=int, default=8)
    parser.add_argument("--shortlist", type=int, default=1024)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    options = LimitsOptions(
        limit=given.limit,
        temperatures=tuple(given.temperatures),
        numbers=given.k,
        max_tokens=given.max_tokens,
        tree_every=given.tree_every,
        shortlist=given.shortlist,
        out=given.records,
        figures=True,
    )
    code = run_limits(options)
    if code == 0:
        given.out.mkdir(parents=True, exist_ok=True)
        for path in given.records.glob("*.svg"):
            shutil.copy(path, given.out)
        save(draw_three_tokens, given.out / "three_tokens.svg")
        page = (given.records / "tables.md").read_text()
        (given.out / "tables.md").write_text(page + "\n" + THREE_TOKENS)
        summary = given.out.parent / "limits.md"
        if summary.is_file():
            summary.write_text(with_tables(summary.read_text(), page))
    return code


if __name__ == "__main__":
    sys.exit(main())
