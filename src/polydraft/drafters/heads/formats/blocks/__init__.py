"""Folders of block heads, and of the terms by which their rows know the path."""
