"""`polydraft serve`: an OpenAI-compatible server."""
