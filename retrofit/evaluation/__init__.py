"""`retrofit eval`: what a memory costs in quality, always beside its teacher and the window-only model."""
