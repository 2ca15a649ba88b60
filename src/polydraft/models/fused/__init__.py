"""The pass of a model of known anatomy in few operations."""
