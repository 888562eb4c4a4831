"""Train the built-in model: synthetic chats, a byte-level BPE tokenizer and a small Llama, on two CPU cores."""
