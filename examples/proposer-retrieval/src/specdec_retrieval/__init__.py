"""Drafts from a datastore of past answers: the draft method ``retrieval`` for specdec."""
