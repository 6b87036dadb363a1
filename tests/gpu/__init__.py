"""Tests of the GPU path, without a GPU."""
