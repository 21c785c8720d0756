"""Suffix decoding: what followed the last tokens, in this request or an earlier one, is drafted now."""
