"""A libcuda and a libnccl that run on the CPU, for tests: see README.md."""
