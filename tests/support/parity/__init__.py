"""What the parity matrix is made of: features, answers that can be compared, and engines to ask."""
