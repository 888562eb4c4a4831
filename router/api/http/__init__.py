"""The HTTP layer below the API: connections, methods, keys, bounds on bodies."""
