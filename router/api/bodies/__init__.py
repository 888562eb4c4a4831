"""Schemas of request bodies."""
