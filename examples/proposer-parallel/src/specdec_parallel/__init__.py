"""Drafts all tokens in one pass with a trained drafter: the draft method ``parallel`` for specdec."""
