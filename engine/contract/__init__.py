"""The types that pass between scheduler and executor, and in and out of an engine. Free of torch."""
