"""Which live streams should go on at another worker, which workers should lean to other work, and orders for both."""
