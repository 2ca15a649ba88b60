"""What a run puts around drafters, models and verifiers: a net for errors, stopwatches, and a witness for planners."""
