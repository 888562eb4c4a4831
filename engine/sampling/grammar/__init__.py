"""The tokens that a grammar allows next: grammars are compiled by llguidance, and followed row by row."""
