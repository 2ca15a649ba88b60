"""Targets whose weights lie on several ranks: one decides, the others mirror its passes."""
