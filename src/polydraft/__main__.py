"""`python -m polydraft`: the command, where its script is not on the path."""

from polydraft_command import main

if __name__ == "__main__":  # a process that a command starts imports this file under another name
    main()
