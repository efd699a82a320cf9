"""Data files of jaxspec: draft models that share the embedding of the target that they were made for."""
