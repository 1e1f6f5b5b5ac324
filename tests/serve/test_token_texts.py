"""Texts by tokens: pieces join to the decoding of the whole, and a token's bytes come from the vocabulary."""

import gc
import random
import weakref

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.api import DEMO_TARGET
from specdec.serve.jobs import Delta
from specdec.serve.replies import Choice, CompletionReply
from specdec.text import StopStrings, TextStream, cut_at_stop
from specdec.vocabulary import vocabulary_of

WORDS = ["▁it", "▁is", "it", "is", "▁true", "true", "▁", "!", "▁w", "ä", "<sep>", "</s>"]


def pieces_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """SentencePiece with byte fallback; the first space of a decoded text is stripped, as Llama 2's."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if scheme == "first" else [])])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": ["<sep>"]})
    return made


TOKENIZERS = {
    "bytes": lambda: AutoTokenizer.from_pretrained(DEMO_TARGET),
    "pieces that strip": lambda: pieces_tokenizer("first"),
    "pieces": lambda: pieces_tokenizer("never"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def drawn(tokenizer, draw) -> list[int]:
    """Ids of any kind: parts of characters, words, special tokens in the middle, and at the beginning."""
    special, words = sorted(tokenizer.all_special_ids), [tokenizer.convert_tokens_to_ids(word) for word in WORDS]
    kinds = [lambda: draw.choice(special), lambda: draw.randrange(len(tokenizer)), lambda: draw.choice(words)]
    ids = [draw.choice(kinds)() for _ in range(draw.randrange(1, 14))]
    return [token for token in ids if token is not None]


def test_pieces_join_to_the_decoding_of_the_whole_and_stop_strings_are_found(tokenizer):
    draw = random.Random(0)
    for _ in range(400):
        ids = drawn(tokenizer, draw)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        start = draw.randrange(len(whole) + 1)
        stops = [stop for stop in (whole[start : start + draw.randrange(1, 5)],) if stop and "\ufffd" not in stop]
        for wanted, ends in ((whole, []), (cut_at_stop(whole, stops), stops)):
            stream, place, text = TextStream(tokenizer, ends), 0, ""
            while place < len(ids):
                size = draw.randrange(1, 4)
                text += stream.feed(ids[place : place + size])
                place += size
            assert text + stream.end() == wanted, (ids, ends)
            assert stream.stopped == bool(ends)


def test_a_row_ends_at_the_token_that_completes_a_stop_string(tokenizer):
    draw = random.Random(3)
    for _ in range(200):
        ids = drawn(tokenizer, draw)
        texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
        stop = texts[-1][-2:]
        if not stop or "\ufffd" in texts[-1] or any("\ufffd" in text for text in texts):
            continue
        rule = StopStrings(tokenizer, [stop])
        ends = next(n for n, token in enumerate(ids, 1) if rule.add(token))
        assert ends == next(n for n, text in enumerate(texts) if stop in text)


def test_a_tokenizer_can_go():
    tokenizer = pieces_tokenizer("never")
    TextStream(tokenizer).feed([5])
    there = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert there() is None


def test_the_bytes_of_tokens_join_to_the_text(tokenizer):
    vocabulary, draw = vocabulary_of(tokenizer), random.Random(1)
    for _ in range(400):
        ids = [token for token in drawn(tokenizer, draw) if token not in tokenizer.all_special_ids]
        text = b"".join(map(vocabulary.bytes_of, ids)).decode(errors="replace")
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        if "\ufffd" not in decoded:  # decoders differ in what they make of bytes that are no character
            assert text.removeprefix(" ") == decoded.removeprefix(" ")


def test_offsets_find_tokens_and_no_two_tokens_become_one(tokenizer):
    draw, vocabulary = random.Random(2), vocabulary_of(tokenizer)
    for _ in range(200):
        ids = [token for token in drawn(tokenizer, draw) if vocabulary.bytes_of(token).isascii()]
        if not ids:
            continue
        choice = Choice(0, None, tokenizer, [])
        likely = [[(token, -1.0), (draw.randrange(len(tokenizer)), -2.0)] for token in ids]
        piece = choice.take(Delta(None, ids, [-1.0] * len(ids), likely, finish="length"))
        made = CompletionReply("id", "m", 0, [choice], 0).fields(choice, piece, whole=True)
        reported = made["logprobs"]
        for token, offset, text, others, given in zip(
            ids, reported["text_offset"], reported["tokens"], reported["top_logprobs"], likely, strict=True
        ):
            assert len(others) == len({token for token, _ in given})
            if token not in tokenizer.all_special_ids:
                assert made["text"][offset:].lstrip(" ").startswith(text.lstrip(" "))
