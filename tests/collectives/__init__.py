"""Tests of every collective that torch offers on CPU, against plain computations, never against
another backend.
"""
