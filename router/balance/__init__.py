"""Which live streams should go on at another worker, and having them moved there."""
