"""What a run puts around drafters, models and verifiers: a net for errors, and stopwatches."""
