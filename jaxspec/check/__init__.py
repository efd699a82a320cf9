"""What jaxspec-check runs."""
