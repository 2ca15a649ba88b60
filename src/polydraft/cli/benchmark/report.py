"""`polydraft report`: a page with tables and figures of what `polydraft bench` measured."""

from polydraft.bench import require_matplotlib
from polydraft.bench.speed import (
    differences_in,
    equality_in_words,
    lossy_arms,
    read_speed_results,
    summarise_speed,
    verdicts,
    write_report,
)
from polydraft.cli.printing import console as new_console
from polydraft.options.commands.bench_options import ReportOptions


def run_report(options: ReportOptions) -> int:
    """Write the page and say what is in it.

    Raises:
        MissingExtra: matplotlib is not installed.
        ResultsError: the runs cannot be read, or the report cannot be written.
    """
    require_matplotlib()
    conditions, records = read_speed_results(options.runs)
    page, *figures = write_report(conditions, records, options.out)
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    console = new_console()
    for line in verdicts(results):
        console.print(line.replace("**", ""), soft_wrap=True)
    console.print(equality_in_words(results, differences_in(records), lossy_arms(conditions)), soft_wrap=True)
    console.print(f"{page}, with {len(figures)} figures beside it.", soft_wrap=True)
    return 0
