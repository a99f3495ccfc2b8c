"""A retrofit behind an OpenAI API: the plugin for vLLM, and `retrofit serve`, which starts an engine that is there."""
