"""Schedulers with scripted connectors, and random worlds around them."""
