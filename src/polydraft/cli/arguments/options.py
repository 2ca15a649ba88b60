"""Options of other commands, for those that are not made of dataclasses yet."""

from functools import cache
from typing import Annotated, Any

from polydraft.cli.words import KINDS
from polydraft.options.commands.bench_options import BenchOptions
from polydraft.options.commands.generate_options import GenerateOptions
from polydraft.options.flags import flags

DRAFTING, MEASURING, MODELS = "Drafting", "Measuring", "Models"
OUTPUT, SAMPLING = "Output", "Sampling"


@cache
def _all(options: type) -> dict[str, Any]:
    return {one.name: one.annotation.__metadata__[0] for one in flags(options, KINDS)}


def _of(options: type, name: str) -> Any:
    """Return what typer is told of an option."""
    return _all(options)[name]


TargetOption = Annotated[str | None, _of(GenerateOptions, "target")]
DraftOption = Annotated[str | None, _of(GenerateOptions, "draft")]
DtypeOption = Annotated[str, _of(GenerateOptions, "dtype")]
DeviceOption = Annotated[str, _of(GenerateOptions, "device")]
TemplateOption = Annotated[bool | None, _of(GenerateOptions, "chat_template")]
BottomUpOption = Annotated[bool, _of(GenerateOptions, "bottom_up")]
PromptsOption = Annotated[list[str] | None, _of(BenchOptions, "prompts")]
LimitOption = Annotated[int, _of(BenchOptions, "limit")]
ExcerptOption = Annotated[int | None, _of(BenchOptions, "excerpt_tokens")]
FixedSeedOption = Annotated[int, _of(BenchOptions, "seed")]
JsonLinesOption = Annotated[bool, _of(BenchOptions, "as_json")]
BenchQuietOption = Annotated[bool, _of(BenchOptions, "quiet")]
