"""Folders of heads that walk."""
