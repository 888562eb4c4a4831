"""Random schemas and regexes, and grammars for tests."""
