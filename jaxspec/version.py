"""The version, apart from the package's top, so that lower modules can read it without importing every name."""

__version__ = "0.1.0"
