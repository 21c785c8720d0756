"""Sums over the GPUs of one host: each writes its terms into the others' memory, and adds up what it is sent.

What is sent goes in words of 64 bits that carry the number of their sum beside the values, so that whoever
waits for a word sees from it alone whether it has come: the LL protocol of NCCL. One trip between two GPUs is
all that a sum waits for.
"""

from .mail import Mail, sum_over_ranks, words_of_sum

__all__ = ["Mail", "sum_over_ranks", "words_of_sum"]
