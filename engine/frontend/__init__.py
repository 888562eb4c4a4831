"""An engine as its callers see it: steps in a thread, and streams of tokens."""
