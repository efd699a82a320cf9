"""Data files of jaxspec: model geometries and decoding presets (TOML)."""
