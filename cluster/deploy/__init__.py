"""Starts or joins a Ray, and brings the cluster on it in line with a configuration."""
