"""`polydraft train`: the embedded pair, and draft heads for any target."""
