"""SWIFT (arXiv 2410.06916)."""
