"""`polydraft generate --input`: a file of prompts through one running batch, into a file of texts."""
