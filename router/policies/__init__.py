"""Replica choice: pure functions over what is known of the replicas."""
