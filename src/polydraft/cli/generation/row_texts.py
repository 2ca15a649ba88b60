"""Rows of a file as texts: the models that write them, the run in which they are written, and their lines."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import Tensor

from polydraft.bench.prompts.prompt import encode
from polydraft.cli.generation.one_text import (
    WARM_UP_STEPS,
    compiling,
    drafter_name,
    drafter_of,
    load_pair_of,
    planned_options,
    text_options,
)
from polydraft.cli.generation.text_file import Line, Row
from polydraft.engine import Completed, ManyRun, generate_many
from polydraft.errors import InvalidParameter
from polydraft.models import Grammar, text_of
from polydraft.options.commands.generate_options import GenerateOptions
from polydraft.planning import PairPlan


class RowTexts:
    """The models that a request names, for rows of its file.

    Args:
        request: the request.
        batch_size: how many texts are in progress at a time.
        grammar: what texts must match; None for anything.
        notes: where it is said that passes are compiled.
    """

    def __init__(self, request: GenerateOptions, batch_size: int, grammar: Grammar | None, notes: Console) -> None:
        self._request, self._batch_size, self._grammar, self._notes = request, batch_size, grammar, notes
        self._pair = load_pair_of(request)

    def encoded(self, rows: Sequence[Row]) -> tuple[dict[Any, Tensor], list[tuple[Row, str]]]:
        """Return the prompts' tokens by their rows' names, and the rows whose conversation is refused, with reasons."""
        prompts: dict[Any, Tensor] = {}
        refused: list[tuple[Row, str]] = []
        for row in rows:
            try:
                prompts[row.id] = encode(self._pair, row.asked)[0]
            except InvalidParameter as error:
                refused.append((row, str(error).removesuffix(".")))
        return prompts, refused

    def begun(
        self, prompts: dict[Any, Tensor], rows: Sequence[Row], options: dict[str, Any], plan: PairPlan | None
    ) -> ManyRun:
        """Return the run that continues the prompts, with the options that their rows have of their own."""
        request, pair, options = self._request, self._pair, {**options}
        options["drafter"] = drafter_of(drafter_name(request), pair, request)
        if plan:
            example = sorted(prompts.values(), key=len)[len(prompts) // 2]
            options |= planned_options(request, plan, pair, example.unsqueeze(0), options, self._notes)
        options |= text_options(request, self._grammar, pair)
        options["seed"] = request.seed or 0
        own = {row.id: _own_options(row, request.sampling) for row in rows if row.own and row.id in prompts}
        options |= {"batch_size": self._batch_size, "per_prompt": own}
        if request.compiled:
            with compiling(self._notes):
                first = generate_many(pair.target, prompts, **options)
                for _ in range(WARM_UP_STEPS):
                    first.step()
        return generate_many(pair.target, prompts, **options)

    def told(self, row: Row, one: Completed) -> Line | str:
        """Return the line of a text, or why there is none."""
        return one.error.removesuffix(".") or _line(row, one, text_of(self._pair.tokenizer, one.tokens))


def _own_options(row: Row, common: dict[str, Any]) -> dict[str, Any]:
    """Return a row's options as the engine takes them; a temperature alone keeps all tokens, as on the command line."""
    warmed = row.own.get("temperature") and "top_k" not in common
    return {**row.own, "top_k": 0} if warmed else row.own


def _line(row: Row, one: Completed, text: str) -> Line:
    line: Line = {
        "id": row.id,
        "line": row.line,
        **row.told,
        "text": text,
        "finish": one.finish,
        "new_tokens": len(one.tokens),
        "target_calls": one.target_calls,
        "block_efficiency": round(one.block_efficiency, 4),
        "accepted": one.accepted,
        "verifier": one.verifier,
        "lossless": one.lossless,
        "seed": one.seed,
    }
    return {**line, "options": row.own} if row.own else line
