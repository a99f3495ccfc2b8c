"""Benchmarks of training, as ratios in one run: `retrofit bench loss` and `retrofit bench step`."""
