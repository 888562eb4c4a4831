"""The parts of benchmarks.whatif_check."""
