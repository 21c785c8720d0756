"""A small language model of the target's tokenizer drafts, one token after another."""
