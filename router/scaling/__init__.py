"""Autoscaling: predicts how many workers the promises need for the load to come, and orders starts and stops."""
