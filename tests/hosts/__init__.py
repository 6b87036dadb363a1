"""Tests on several hosts, each a network namespace of this machine.

They must never touch the network of the machine itself, and leave nothing behind.
"""
