"""The parts of ``benchmarks.promise_scaling_real``: workers that are as slow as a machine, and a cluster of them."""
