"""SwiftSpec (arXiv 2506.11309)."""
