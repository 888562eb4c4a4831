"""The prefill role: an engine whose requests end after the first token and whose blocks stay leased."""
