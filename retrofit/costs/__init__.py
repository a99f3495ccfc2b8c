"""`retrofit estimate` and what it counts with: bytes that are held, operations, the AHN paper's own table."""
