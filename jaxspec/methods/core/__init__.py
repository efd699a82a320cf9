"""What the methods share: sequences, verification, drafting, acceptance, costs."""
