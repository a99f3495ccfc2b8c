"""`retrofit report`: what a run left on disk as one HTML page and as figures."""
