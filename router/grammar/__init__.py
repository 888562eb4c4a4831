"""What an answer's text must match: from schemas, regexes and choices to the grammars that engines read, checked."""
