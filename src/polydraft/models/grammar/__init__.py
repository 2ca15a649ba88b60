"""Grammars that texts follow: what they are, and their masks over tokens at every node of a tree."""
