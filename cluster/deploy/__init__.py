"""A Ray to live on, and bringing what runs there in line with a configuration."""
