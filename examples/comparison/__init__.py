"""What examples/demo.py is made of.

Nothing here is needed for using gflow: the other examples show that. It must never treat one
method otherwise than the others, but for what makes the method.
"""
