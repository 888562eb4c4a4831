"""Real clusters, their clients, and attackers."""
