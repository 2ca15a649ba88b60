"""Calls of tools and reasoning in answers: formats as data, the reader of answers, and the grammars of calls."""
