"""What a run learns from: rows of tokens, and what is held out of them."""
