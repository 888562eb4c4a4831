"""Keeps finished responses of /v1/responses for a while, so that later requests can continue from them."""
