"""How many workers the promises need for the load to come: predictions, the policy, and orders to start and stop."""
