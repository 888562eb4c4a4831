"""What every tier of evicted blocks shares: which content lies in which slot, and the way back into the KV cache."""
