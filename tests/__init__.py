"""The tests of gflow, a package so that a rank can import a test's functions by module and name.

It must never run anything when it is imported.
"""
