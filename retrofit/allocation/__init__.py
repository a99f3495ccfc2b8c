"""`retrofit allocate`: how many bytes each layer's window and memory get, measured by forward passes only."""
