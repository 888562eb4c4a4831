"""What is known of the replicas, and the choice among them."""
