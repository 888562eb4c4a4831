"""Doubles and cases for attention backends."""
