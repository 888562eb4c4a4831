"""Decides which live streams move to another worker and which workers change their leaning, and orders both."""
