"""Translates a body's parameters to the engine's: sampling, log-probabilities, limits, rules and grammars."""
