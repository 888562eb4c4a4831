"""Real clusters: Ray, Serve, NIXL and HTTP."""
