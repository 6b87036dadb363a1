"""The version of gflow, in one place for code that must not read package metadata."""

__version__ = "0.1.0"
