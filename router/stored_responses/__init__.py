"""Responses of /v1/responses that are kept for a while, so that others can follow on them."""
