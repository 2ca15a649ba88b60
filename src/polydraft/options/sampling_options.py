"""Options of sampling: flags, keywords of `SamplingParams`, and fields of requests; names are Hugging Face's."""

from dataclasses import dataclass
from typing import Any

from polydraft.options.option import LARGEST_COUNT, Range, ServerField, option, options_of

SAMPLING = "Sampling"
FILTERS = ("top_k", "top_p", "min_p")
"""Options that cut the sampled distribution, and do nothing at temperature 0."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from a model's logits; None is what was not given."""

    temperature: float = option(
        0.0,
        "0 is greedy decoding. Above 0 the whole distribution is sampled from, unless --top-k, --top-p or "
        "--min-p cut it; in Python top_k is 50, Hugging Face's default, unless it is given.",
        SAMPLING,
        range=Range(0),
        field=ServerField(1.0, most=100),
    )
    top_p: float | None = option(
        None, "Nucleus mass in (0, 1].", SAMPLING, range=Range(above=0, most=1), field=ServerField(1.0)
    )
    top_k: int | None = option(
        None,
        "Most likely tokens to keep; 0, the default here, keeps all (Hugging Face's default is 50).",
        SAMPLING,
        largest=LARGEST_COUNT,
        range=Range(0),
        field=ServerField(0, least=-1, most=LARGEST_COUNT),
    )
    min_p: float | None = option(
        None, "Share of the top token's probability to keep.", SAMPLING, range=Range(0, 1), field=ServerField()
    )
    typical_p: float | None = option(
        None, "Mass of the most typical tokens in (0, 1].", flag=None, range=Range(above=0, most=1)
    )
    repetition_penalty: float | None = option(
        None, "Above 0; 1 is off.", SAMPLING, range=Range(above=0), field=ServerField(least=0.01, most=100)
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that hold; above temperature 0 all tokens are kept unless something else is said."""
        given = {one.name: getattr(self, one.name) for one in options_of(Sampling)}
        if self.top_k is None and self.temperature > 0:
            given["top_k"] = 0
        return {name: value for name, value in given.items() if value is not None}
