"""See :mod:`.reader`."""
