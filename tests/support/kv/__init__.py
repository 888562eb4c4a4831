"""Both sides of a hand-over, in one process or in several."""
