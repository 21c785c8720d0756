"""Medusa heads: each guesses a token further ahead from the target's last hidden state."""
