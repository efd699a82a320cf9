"""What jaxspec-bench runs."""
