"""Parts of the parity matrix: features, comparable answers, and engines."""
