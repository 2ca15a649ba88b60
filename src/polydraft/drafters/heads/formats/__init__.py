"""Folders of published heads, read and written."""
