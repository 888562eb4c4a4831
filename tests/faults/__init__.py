"""A real cluster that is broken in every way."""
