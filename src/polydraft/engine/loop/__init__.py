"""The decode loop: a batch of rows, how it begins with prompts, and its steps."""
