"""The start-up store: compiled programs and packed weights, kept ready in the folder of the compile cache."""
