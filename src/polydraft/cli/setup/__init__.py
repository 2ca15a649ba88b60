"""Commands about this machine: what is installed and what it can do, and completion for shells."""
