"""Learning from texts while they are served: versions of a draft, and what may become one."""
