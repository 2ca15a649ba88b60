"""Options, each written once: the command line's flags, the checks of keywords and the server's fields follow."""
