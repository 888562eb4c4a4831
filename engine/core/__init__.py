"""Scheduling policy, free of torch: requests, block pool, prefix cache, queues, the scheduler."""
