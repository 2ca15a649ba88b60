"""Verification on the host: trees walked node by node, so that only the laws of visited nodes are computed."""
