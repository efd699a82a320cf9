"""Checkpoints: Hugging Face folders, GGUF files and the native format."""
