"""Proposers of draft tokens: they guess the next tokens, so that one step can verify several."""
