"""The data of the live page: a state of the cluster, sampled once for all watchers, its changes, and a timeline."""
