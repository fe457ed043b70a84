"""Generation of text: one token at a time by a causal model, or by filling in masked blocks."""
