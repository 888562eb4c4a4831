"""What HTTP asks before the API does: connections, methods, keys, bounds on bodies."""
