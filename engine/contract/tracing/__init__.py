"""What routers and engines tell each other to trace requests."""
