"""The benchmark that jaxspec-bench runs."""
