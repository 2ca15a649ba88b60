"""Draft heads: drafters trained on the hidden states of their target."""
