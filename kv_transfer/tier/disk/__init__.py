"""The disk tier: blocks that the prefix cache evicted, kept in files and found again after a restart."""
