"""A simulated cluster: real routers and schedulers, workers that compute nothing, a clock that jumps to each event."""
