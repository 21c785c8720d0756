"""EAGLE heads: a decoder layer on the target's own hidden states drafts chains and trees."""
