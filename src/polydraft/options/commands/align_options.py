"""Options of `polydraft align`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.options.commands.option_groups import (
    CHAT_TEMPLATE,
    DEVICE,
    DRAFT,
    DTYPE,
    FOLDER,
    JSON,
    LIMIT,
    MEASURING,
    NEW_TOKENS,
    OUTPUT,
    PROMPT_FILES,
    SEED,
    TARGET,
)
from polydraft.options.option import Range, count, option
from polydraft.options.sampling_options import FILTERS, SAMPLING

TRAINING = "Training"


@dataclass(frozen=True, kw_only=True)
class AlignOptions:
    """One call of `polydraft align`; what is None has another default for making than for measuring, or none."""

    target: str = TARGET.but(
        help="Target model: folder, .gguf file, hub name, smollm2, or pair.", argument=True
    ).needed()
    draft: str | None = DRAFT.but(
        help="What you have: a draft model (folder, hub name, pair-draft), which is tuned; or a head, self:int8, or a "
        "stack, which new drafts are compared with. With --measure also mtp and ngram."
    ).usually(None)
    out: Path | None = FOLDER.but(help="The new draft's folder. Default: aligned.", panel=OUTPUT).usually(None)
    work: Path | None = FOLDER.but(
        help="The target's text and checkpoints; the same call goes on from here. Default: OUT-work.",
        panel=OUTPUT,
    ).usually(None)
    minutes: float | None = option(None, "The time of all stages together. Default: 20.", TRAINING)
    forms: tuple[str, ...] = option(
        (),
        "What the draft is made of, may be repeated: auto (what can pay here), tuned or lora (--draft learns on), "
        "layers or width (some of the target's), small (a new model), vocabulary (a head of fewer tokens), boost:N "
        "(drafts that cover what others miss), or a kind of head of `polydraft train head`, as pard. Default: auto.",
        TRAINING,
        metavar="NAME",
        flag="--form",
    )
    losses: tuple[str, ...] = option(
        (),
        "A loss to try, may be repeated: fkl, rkl, jsd, tvd, tvd++, lk-alpha, lk-alpha-2, lk-lambda, adaspec, calls, "
        "accepted, products, or another of docs/alignment.md. Default: what suits each form.",
        TRAINING,
        metavar="NAME",
        flag="--loss",
    )
    texts: int | None = count(
        None, "Texts that the target writes behind a prompt, at most. Default: as many as there is time for.", TRAINING
    )
    most_bytes: int | None = option(
        None, "The most bytes that the work folder may take. Default: 8000000000.", OUTPUT, least=1
    )
    measure: bool = option(
        False, "Tell how many tokens a target call brings with this draft, on text that the target writes.", MEASURING
    )
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int | None = LIMIT.but(help="Prompts of each task. Default: all; with --measure 16.").usually(None)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    temperatures: tuple[float, ...] = option(
        (), "0 is greedy; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    top_p: float | None = option(None, "Nucleus mass in (0, 1].", SAMPLING, range=Range(above=0, most=1))
    top_k: int | None = option(None, "Most likely tokens to keep; 0 keeps all.", SAMPLING, range=Range(0))
    min_p: float | None = option(None, "Share of the top token's probability to keep.", SAMPLING, range=Range(0, 1))
    length: int | None = count(None, "With --measure: drafts of the longest chain. Default: 5.", MEASURING, most=64)
    max_new_tokens: int = NEW_TOKENS.usually(64)
    seed: int = SEED.usually(0)
    as_json: bool = JSON.usually(False)

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that are given, by name."""
        given = {name: getattr(self, name) for name in FILTERS}
        return {name: value for name, value in given.items() if value is not None}
