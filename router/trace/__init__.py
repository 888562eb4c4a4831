"""What became of each request, part by part, for those who ask where it waited and why there."""
