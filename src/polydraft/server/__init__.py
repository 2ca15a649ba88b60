"""An OpenAI-compatible server for any target with any drafter."""
