"""Operations that decide the speed of a decoding step: one folder each, a reference beside every fast path."""
