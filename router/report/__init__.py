"""What routers tell: status of the cluster, counters, metrics."""
