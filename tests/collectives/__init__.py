"""Tests of every collective that torch offers on CPU, with values from plain computations.

Nothing here may take an expected value from another backend.
"""
