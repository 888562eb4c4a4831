"""Answers: their formats, streamed or whole."""
