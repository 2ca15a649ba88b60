"""`polydraft store`: stores of texts for drafters that look up what followed, built from files and shown."""

from polydraft.cli.stores.commands import store_app

__all__ = ["store_app"]
