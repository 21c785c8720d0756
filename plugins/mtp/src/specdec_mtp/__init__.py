"""Multi-token prediction: the target's own extra layers draft."""
