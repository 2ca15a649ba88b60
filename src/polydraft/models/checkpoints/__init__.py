"""Model folders: where a name leads, what a folder must hold, and why it is refused."""
