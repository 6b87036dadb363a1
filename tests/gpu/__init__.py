"""Tests of the GPU path, without a GPU.

Nothing here runs when it is imported.
"""
