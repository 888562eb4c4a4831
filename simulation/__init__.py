"""A cluster whose workers compute nothing: the real router and schedulers on a clock that jumps from event to event."""
