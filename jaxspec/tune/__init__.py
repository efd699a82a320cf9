"""The measurements and choices of jaxspec-tune."""
