"""What routers report: the cluster's status, counters, and metrics."""
