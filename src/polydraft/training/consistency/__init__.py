"""Tuning a model so that Jacobi decoding of its blocks ends after few passes (CLLM)."""
