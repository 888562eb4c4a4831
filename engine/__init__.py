"""One engine: tokens in, tokens out. Knows no Ray, HTTP, tokenizer, role or NIXL."""
