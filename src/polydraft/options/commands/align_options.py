"""Options of `polydraft align`."""

from dataclasses import dataclass

from polydraft.options.commands.option_groups import (
    CHAT_TEMPLATE,
    DEVICE,
    DRAFT,
    DTYPE,
    JSON,
    LIMIT,
    MEASURING,
    NEW_TOKENS,
    PROMPT_FILES,
    SEED,
    TARGET,
)
from polydraft.options.option import count, option
from polydraft.options.sampling_options import SAMPLING


@dataclass(frozen=True, kw_only=True)
class AlignOptions:
    """One call of `polydraft align`."""

    target: str = TARGET.but(
        help="Target model: folder, .gguf file, hub name, smollm2, or pair.", argument=True
    ).needed()
    draft: str | None = DRAFT.but(help="Draft model or head: folder, hub name, pair-draft, self:int8, mtp.").usually(
        None
    )
    measure: bool = option(
        False, "Tell how many tokens a target call brings with this draft, on text that the target writes.", MEASURING
    )
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    prompts: tuple[str, ...] = PROMPT_FILES.usually(())
    limit: int = LIMIT.usually(16)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    temperatures: tuple[float, ...] = option(
        (), "0 is greedy; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    length: int = count(5, "Drafts of the longest chain.", MEASURING, most=64)
    max_new_tokens: int = NEW_TOKENS.usually(64)
    seed: int = SEED.usually(0)
    as_json: bool = JSON.usually(False)
