"""What every verb reads as text: sources, documents and conversations, and their tokens."""
