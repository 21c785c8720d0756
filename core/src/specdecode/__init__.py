"""specdecode."""
