"""The public surface: LLM, LLMEngine, parameters and outputs."""
