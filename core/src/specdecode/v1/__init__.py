"""Names under the paths that scripts for vLLM import them from; nothing else is here."""
