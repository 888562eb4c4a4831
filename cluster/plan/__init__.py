"""Placement and memory arithmetic before anything starts. Imports no Ray at module level."""
