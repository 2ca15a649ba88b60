"""Whether continuations are looked up at all: what looking takes, in every step, against what it saves."""

FIRST = 8
"""So many steps are looked at before looking may be given up."""
LONGEST = 32
"""A mean is one of about so many recent steps with looking: what is found comes in bursts."""
AGAIN = 3
"""After a pause what was seen before counts as so many steps at most: texts change."""


class LookupCosts:
    """Learn whether looking for continuations pays, for one number of rows.

    Problem: to look takes time in every step and for every row, also where nothing is found, and where all rows
    together are a full batch there is little to be saved.
    Rule: continuations are looked up as long as they save at least as much time, on the mean over recent steps, as
    looking takes. What they save is the time in which the tree of the step would have brought as many tokens, less that
    of the step; nothing where none were taken.

    Args:
        rows: the texts in the batch.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.took, self._timed = rows, 0.0, 0
        self._saved, self._seen = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        self._begun = {True: 0, False: 0}

    def for_rows(self, rows: int) -> "LookupCosts":
        """Return what this makes one expect of other rows: it takes time for each, and saves no more."""
        after = LookupCosts(rows)
        after.took, after._timed = self.took * rows / self.rows, min(1, self._timed)
        after._saved, after._begun = dict(self._saved), dict(self._begun)
        after._seen = {drafts: min(AGAIN, count) for drafts, count in self._seen.items()}
        return after

    def learn(self, took: float | None, saved: float, *, drafts: bool) -> None:
        """Learn from a step in which continuations were looked up.

        Args:
            took: the seconds; None where they could not be told from those of a draft model.
            saved: the seconds that continuations saved; below nothing where they lost some.
            drafts: whether a draft model drafts the rows for which nothing is found.
        """
        if took is not None:
            self._timed += 1
            self.took += (took - self.took) / min(self._timed, LONGEST)
        self._begun[drafts] += 1
        self._seen[drafts] += 1
        self._saved[drafts] += (saved - self._saved[drafts]) / min(self._seen[drafts], LONGEST)

    def pause(self, *, drafts: bool) -> None:
        """Note that nothing is looked up for a while."""
        self._seen[drafts] = min(AGAIN, self._seen[drafts])

    def loss(self, *, drafts: bool) -> float:
        """Return the seconds that a step with looking is expected to lose; none where too little is known."""
        known = self._timed and self._begun[drafts] >= FIRST
        return max(0.0, self.took - self._saved[drafts]) if known else 0.0
