"""The bytes of KV blocks, wherever they lie."""
