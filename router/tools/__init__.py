"""Separates thinking, content and tool calls in answers: the models' formats, their grammars, and parsers."""
