"""Who drafts where a call says what the answer will resemble."""

from typing import Any, cast

from polydraft.drafters import Drafter, PredictedDrafter, proposes, route_before
from polydraft.errors import InvalidParameter


def with_prediction(prediction: object, drafter: Drafter) -> Drafter:
    """Return a drafter with a prediction before it, row by row.

    Raises:
        InvalidParameter: nothing is to be drafted.
    """
    if not proposes(drafter):
        raise InvalidParameter(
            "prediction is to be drafted, but the drafter none drafts nothing; leave one of them out."
        )
    return route_before(PredictedDrafter(cast(Any, prediction)), drafter)
