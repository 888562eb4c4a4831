"""Machine code of our own for the CPU, compiled by numba and run on torch's threads."""
