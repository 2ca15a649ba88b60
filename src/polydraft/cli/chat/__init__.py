"""`polydraft chat`: a conversation with a model, in the terminal, from a file or through a pipe."""
