"""Moves KV blocks between engines: protocol, leases, connectors. Imports nothing else of Baton."""
