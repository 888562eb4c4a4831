"""Which tokens a grammar allows next: grammars compiled by llguidance, followed row by row."""
