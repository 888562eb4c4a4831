"""Hand-overs between virtual workers."""
