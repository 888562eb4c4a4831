"""The cluster as people watch it: one state, sampled for all watchers, its changes, and what happened as a timeline."""
