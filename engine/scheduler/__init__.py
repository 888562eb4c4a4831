"""The scheduler: decides which tokens of which requests each step computes. Free of torch."""
