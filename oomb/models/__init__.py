"""Hugging Face models: what is supported, how the engine hooks in, shapes, loading."""
