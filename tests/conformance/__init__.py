"""PyTorch's own backend suite, run against gflow.

Run it with `python -m tests.conformance`. This package decides which of PyTorch's tests run and
how their processes start and end, not what a test asserts.
"""
