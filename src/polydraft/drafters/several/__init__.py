"""Several drafters for one text: one of them for every step, or all in one tree."""
