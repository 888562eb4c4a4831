"""The Serve graph: routers and workers as deployments, and the calls between them."""
