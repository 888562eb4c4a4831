"""The hand-over protocol between two engines: meeting, reading, leases, streams."""
