"""Whose code failed: what a request brings along names it in its errors, so that no other text is lost for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.engine import Request
from polydraft.engine.target_law import RULED_OUT, StoppingCriterion
from polydraft.errors import InvalidParameter
from polydraft.models import RowProcessor


class RequestError(Exception):
    """An error of what one request brought along.

    Args:
        whose: the request's name.
        error: the error.
    """

    def __init__(self, whose: str, error: Exception) -> None:
        super().__init__(str(error))
        self.whose, self.error = whose, error


@dataclass(frozen=True, eq=False)
class _Processor:
    """A processor of a request; the last one sees that a token is left."""

    own: RowProcessor
    whose: str
    last: bool

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def keeps_state(self) -> bool:
        return self.own.keeps_state

    def fork(self, memo: dict[int, Any]) -> "_Processor":
        return replace(self, own=self.own.fork(memo))

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        with _blaming(self.whose):
            changed = self.own(history, scores)
            if self.last and not bool((changed > RULED_OUT).any(-1).all()):
                raise InvalidParameter(
                    "The fields of the request leave no token to go on with, such as a grammar that must end and "
                    "min_tokens that hold back the end; leave one of them out."
                )
            return changed


@dataclass(frozen=True, eq=False)
class _Criterion:
    """A criterion of a request."""

    own: StoppingCriterion
    whose: str
    stateless = True

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: object) -> Any:
        with _blaming(self.whose):
            return self.own(input_ids, scores)


@contextmanager
def _blaming(whose: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RequestError(whose, error) from error


def with_name(request: Request, whose: str) -> Request:
    """Return a text whose processors and criteria say in their errors whose they are."""
    given, ending = request.law.processors, request.ending
    processors = tuple(_Processor(one, whose, place == len(given) - 1) for place, one in enumerate(given))
    criteria = tuple(_Criterion(one, whose) for one in ending.criteria)
    return replace(request, law=replace(request.law, processors=processors), ending=replace(ending, criteria=criteria))
