"""Plain and speculative decoding side by side on real prompts: tasks, running, report."""
