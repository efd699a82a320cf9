"""Areas of `tools/fuzz_hostile.py`: each makes cases from a number, and runs them against jaxspec."""
