"""Beam search without rows and blocks: the choice among candidates, and what is known of a request's beams."""
