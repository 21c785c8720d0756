"""Prompt lookup: the last tokens occurred before, so what followed them then is drafted now."""
