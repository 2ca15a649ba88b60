"""Training: the embedded pair."""
