"""Requests: what is known of each, the order in which they wait, the rows of those that run."""
