"""Engines, runners and models under a test's control."""
