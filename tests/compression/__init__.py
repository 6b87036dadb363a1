"""Tests of the compressed exchange of gradients, through DDP in real processes."""
