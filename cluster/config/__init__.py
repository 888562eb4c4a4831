"""The configuration of a cluster: sections, file, flags."""
