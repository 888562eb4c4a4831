"""Guessing the tokens that come next, so that one step can verify several."""
