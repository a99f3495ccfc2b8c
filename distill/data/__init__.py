"""What a run learns from: sources, tokens, conversations, rows, and what is held out of them."""
