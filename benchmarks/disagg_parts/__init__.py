"""The parts of benchmarks.disagg."""
