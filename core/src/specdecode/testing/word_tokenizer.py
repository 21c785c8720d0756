"""A tokenizer whose text shows which tokens it is made of, with characters that take several tokens."""

from __future__ import annotations

from typing import Any

SPECIAL = ("▁<pad>", "▁<bos>", "▁<eos>")
#: Characters in UTF-8 bytes, a token each, at the end of the vocabulary: one, two, three and four bytes.
CHARACTERS = ("a", "é", "€", "😀")


def byte_ids(character: str, vocab_size: int) -> list[int]:
    """The tokens of one of :data:`CHARACTERS`."""
    values = list("".join(CHARACTERS).encode())
    return [vocab_size - len(values) + values.index(byte) for byte in character.encode()]


def word_tokenizer(vocab_size: int = 300) -> Any:
    """As Llama's (words with their space before them, bytes for the rest), with one token a word.

    Token ``i`` reads ``wi`` behind a space; 0 to 2 are the special tokens; the last ten are bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    values = "".join(CHARACTERS).encode()
    first_byte = vocab_size - len(values)
    pieces = [*SPECIAL, *(f"▁w{token}" for token in range(len(SPECIAL), first_byte))]
    pieces += [f"<0x{value:02X}>" for value in values]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True, unk_token=SPECIAL[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
