"""KV that comes from or goes to other engines or tiers: loads, early loads, leases, announcements, repair."""
