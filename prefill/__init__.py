"""The prefill role: workers whose requests end after the first token, with their blocks under a lease."""
