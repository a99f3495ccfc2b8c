"""Recipes: YAML files, one run each, that `retrofit recipes ls` lists and `retrofit distill NAME` runs."""
