"""Tokenizers, streamed text and chat templates."""
