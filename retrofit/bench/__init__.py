"""`retrofit bench`: what a bounded memory costs and saves, as ratios measured in one run on the machine at hand."""
