"""Parts that the methods share: sequences, verification, drafting, acceptance, costs."""
