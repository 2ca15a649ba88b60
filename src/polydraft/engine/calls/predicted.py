"""Who drafts where a call says what the answer will resemble."""

from typing import Any, cast

from polydraft.drafters import Drafter, PredictedDrafter, RoutedDrafter, TextDrafter, usual_members
from polydraft.errors import InvalidParameter


def with_prediction(prediction: object, drafter: Drafter | None) -> Drafter:
    """Return a drafter with a prediction before it, row by row; before the usual text drafters if there is none.

    Raises:
        InvalidParameter: nothing is to be drafted.
    """
    predicted = PredictedDrafter(cast(Any, prediction))
    if drafter is None:
        return RoutedDrafter((predicted, *usual_members()))
    if not drafter.proposes:
        raise InvalidParameter(
            "prediction is to be drafted, but the drafter none drafts nothing; leave one of them out."
        )
    if isinstance(drafter, TextDrafter) and not drafter.riders:
        return RoutedDrafter((predicted, drafter))
    return RoutedDrafter((predicted,), drafter)
