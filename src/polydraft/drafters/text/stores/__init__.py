"""Texts on disk, for drafters that look up what followed: one format, one folder of files that are never changed.

A store is a folder of segments. A segment holds texts and an order of their places by what stands before each, read
backwards: all places that end with a context's last 1, 2, 3, ... tokens lie side by side, in ranges within ranges,
which one descent by binary search finds. It is written beside its place and renamed, mapped into memory, and never
changed.
"""
