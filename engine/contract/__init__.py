"""What passes between deciding and computing, and in and out of an engine. Free of torch."""
