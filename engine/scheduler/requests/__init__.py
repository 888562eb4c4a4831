"""Requests: what is known of each, the queues in which they wait, and the rows of running ones."""
