"""What of an answer is thinking, content and calls of tools: formats of models, their grammars, and what reads them."""
