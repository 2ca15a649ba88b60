"""Training draft heads on the text and the hidden states of their target."""
