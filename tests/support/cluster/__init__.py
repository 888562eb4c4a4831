"""Real clusters, and who uses or attacks them."""
