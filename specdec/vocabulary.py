"""The bytes of each token, from the tokenizer's vocabulary.

Decoding a token alone is wrong in two ways: some tokenizers strip the first space, and a token may hold a part of a
character only. Known forms: byte-level BPE (GPT-2, Llama 3, Qwen), SentencePiece with byte fallback (Llama 2, Gemma),
WordPiece (BERT).
"""

import json
import re
from functools import lru_cache
from weakref import WeakKeyDictionary, proxy

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback of SentencePiece
SPACE = "\u2581"  # a space in SentencePiece
_MADE: "WeakKeyDictionary[object, Vocabulary]" = WeakKeyDictionary()


@lru_cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


def vocabulary_of(tokenizer) -> "Vocabulary":
    """Return the vocabulary of a tokenizer, made once."""
    if tokenizer not in _MADE:
        _MADE[tokenizer] = Vocabulary(tokenizer)
    return _MADE[tokenizer]


class Vocabulary:
    """Token ids -> bytes and texts of a transformers tokenizer."""

    def __init__(self, tokenizer):
        """Read the vocabulary of a tokenizer."""
        self._tokenizer = proxy(tokenizer)  # a strong reference from a value of `_MADE` would keep its key alive
        self.added = {token: added.content.encode() for token, added in tokenizer.added_tokens_decoder.items()}
        self.special = frozenset(tokenizer.all_special_ids)
        self.form = _form(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in a text; those of an unknown form are the ones of the token decoded alone."""
        if token not in self._bytes:
            self._bytes[token] = self.added[token] if token in self.added else self._read(token)
        return self._bytes[token]

    def is_byte(self, token: int) -> bool:
        """Return whether a token is a single byte of SentencePiece's byte fallback."""
        return self.form == "pieces" and token not in self.added and bool(BYTE.fullmatch(self._piece(token) or ""))

    def text_of(self, token: int) -> str:
        """Return the text of a token; of a part of a character `bytes:` and its bytes, as OpenAI writes it."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _piece(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)

    def _read(self, token: int) -> bytes:
        piece = self._piece(token)
        if piece is None:  # the target's vocabulary is padded
            return b""
        if self.form == "bytes" and all(char in _byte_of() for char in piece):
            return bytes(_byte_of()[char] for char in piece)
        if self.form == "pieces":
            byte = BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        if self.form == "words":
            return (piece[2:] if piece.startswith("##") else f" {piece}").encode()
        return self._tokenizer.decode([token]).encode()


def _form(tokenizer) -> str:
    """Return 'bytes', 'pieces', 'words', or '' for an unknown form."""
    if tokenizer.is_fast:
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"), ensure_ascii=False)
        marks = {
            "bytes": ('"ByteLevel"',),
            "pieces": (SPACE, '"Metaspace"', '"ByteFallback"'),
            "words": ('"WordPiece"',),
        }
        return next((form for form, names in marks.items() if any(name in decoder for name in names)), "")
    pieces = tokenizer.get_vocab()
    spaces = {"bytes": "\u0120", "pieces": SPACE, "words": "##"}  # how most pieces with a space begin
    return next((form for form, mark in spaces.items() if any(piece.startswith(mark) for piece in pieces)), "")
