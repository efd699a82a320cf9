"""What jaxspec-tune runs."""
