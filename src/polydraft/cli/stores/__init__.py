"""`polydraft store`: stores of texts."""
