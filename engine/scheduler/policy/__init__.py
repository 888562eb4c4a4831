"""Choices that a deployment can make otherwise: who is preempted, who is held back."""
