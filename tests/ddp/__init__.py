"""Tests of DistributedDataParallel on gflow."""
