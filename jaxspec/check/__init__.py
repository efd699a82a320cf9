"""The checks that jaxspec-check runs."""
