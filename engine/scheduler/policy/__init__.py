"""Policies that a deployment can change: which requests are preempted, and which are held back."""
