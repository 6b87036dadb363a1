"""Tests on several hosts, each a network namespace of this machine.

They never touch the machine's own network, and leave nothing behind.
"""
