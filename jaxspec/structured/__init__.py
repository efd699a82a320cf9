"""Answers with a shape: grammars that a tokenizer's tokens are matched against, and masks of the tokens they allow."""
