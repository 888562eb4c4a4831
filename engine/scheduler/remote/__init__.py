"""KV that comes from or goes to other places: loads, early loads, leases, announcements, repair."""
