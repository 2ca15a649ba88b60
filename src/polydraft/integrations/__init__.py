"""Parts that other libraries call, each a module of its own that needs its library."""
