"""An engine as its callers see it: the thread that steps it, and streams of tokens."""
