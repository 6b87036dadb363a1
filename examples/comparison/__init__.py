"""The parts of examples/demo.py.

Nothing here is needed for using gflow: the other examples show that. All methods are treated alike,
except for what makes the method.
"""
