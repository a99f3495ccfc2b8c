"""What runs inside the model.

Flat, and imports nothing but torch, transformers and its own files: an exported checkpoint carries them as they are.
"""
