"""What a body asks for, as what the engine works by: sampling, log-probabilities, limits, rules and grammars."""
