"""Beam search without rows and blocks: the choice among candidates, and the state of a request's beams."""
