"""An OpenAI-compatible HTTP server over :class:`~specdecode.AsyncLLM`; wants ``specdec-core[serve]``."""
