"""The options of every command, each command a dataclass."""
