"""From logits to tokens: processors, filters, draws, log-probabilities."""
