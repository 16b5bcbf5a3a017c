"""A Hugging Face Trainer. Start with `callback`."""
