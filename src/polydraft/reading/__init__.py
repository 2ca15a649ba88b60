"""Reading text with a model: what was read, what one pass found out, and what a whole step did."""

from polydraft.reading.chains import ChainReader, reader_of
from polydraft.reading.reader import KeylessReader, Reader
from polydraft.reading.values import Features, Scored, Step, Text
from polydraft.reading.written import first_drafts

__all__ = [
    "ChainReader",
    "Features",
    "KeylessReader",
    "Reader",
    "Scored",
    "Step",
    "Text",
    "first_drafts",
    "reader_of",
]
