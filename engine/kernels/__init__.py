"""Our own CPU kernels, compiled by numba and run on torch's threads."""
