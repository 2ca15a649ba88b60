"""Hugging Face's generation call: its arguments, what it prepares, and the processors that it hands over."""
