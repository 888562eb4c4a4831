"""One request's life in the router."""
