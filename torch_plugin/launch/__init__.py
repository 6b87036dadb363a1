"""Starts processes on this machine: ranks, and the network namespaces that play several hosts.

Commands, examples and tests use it; the backend never does. ``process`` runs one program, ``ranks``
runs one per rank, ``namespaces`` builds hosts. ``child`` and ``rank`` run inside what is started.
"""
