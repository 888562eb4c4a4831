"""What passes between routers and engines for the traces of requests."""
