"""Training of draft methods: ``specdecode train METHOD``. What a method contributes is a ``Recipe``."""
