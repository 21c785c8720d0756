"""Adapters of the target (LoRA, arXiv 2106.09685): what a request asks for, what files hold, who has a slot.

Files are PEFT's. What adapters compute is in :mod:`specdecode.layers.adapters`.
"""
