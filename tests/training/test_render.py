"""Loss masks: 40 chat templates x 12 conversations, against an oracle that renders with and without each answer."""

import itertools
import json

import pytest
from transformers import AutoTokenizer

from specdec.api import DEMO_TARGET
from specdec.training.data.conversation import conversation_of
from specdec.training.data.render import RETOKENISED, SPLIT, render, tokens_of

# How a turn begins and ends: ChatML, Llama 3, Zephyr, Gemma, Phi, Vicuna, DeepSeek, Llama 2
FORMS = {
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama3": ("<|start|>{role}<|h|>\n\n", "<|eot|>", "<|start|>assistant<|h|>\n\n"),
    "zephyr": ("<|{role}|>\n", "</s>\n", "<|assistant|>\n"),
    "gemma": ("<turn>{role}\n", "<end>\n", "<turn>assistant\n"),
    "phi": ("<|{role}|>", "<|end|>", "<|assistant|>"),
    "vicuna": ("{role}: ", "<|end|>", "assistant: "),
    "deepseek": ("<{role}>", "<eos>", "<assistant>"),
    "inst": ("[{role}] ", "<|end|>", "[assistant] "),
}
# What the template does with an answer: as it is; trimmed; reasoning of the last only (Qwen3); cut before `</think>`
# and a prompt that opens reasoning (R1); an empty thought in front of the last answer
KINDS = ("plain", "trimmed", "marked", "last_thinks", "cut")


def template(form: str, kind: str) -> str:
    begin, end, prompt = FORMS[form]
    role = begin.replace("{role}", '" + m.role + "').replace("\n", "\\n")
    said = "m.content if m.content is string else m.content | map(attribute='text') | join('')"
    answer = {
        "plain": "{{ c }}",
        "trimmed": "{{ c | trim }}",
        "marked": "{% generation %}{{ c }}",
        "last_thinks": "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ c }}",
        "cut": "{{ c.split('</think>')[-1] }}",
    }[kind]
    close = '{{ "' + end.replace("\n", "\\n") + '" }}' + ("{% endgeneration %}" if kind == "marked" else "")
    opened = prompt + ("<think>" if kind == "cut" else "")
    return (
        "{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}"
        "{%- for m in messages -%}{%- set c = " + said + " -%}"
        '{{ "' + role + '" }}'
        "{%- if m.role == 'assistant' -%}" + answer
        + "{%- for call in m.tool_calls or [] -%}<call>{{ call | tojson }}</call>{%- endfor -%}" + close
        + '{%- else -%}{{ c }}{{ "' + end.replace("\n", "\\n") + '" }}{%- endif -%}'
        "{%- endfor -%}"
        '{%- if add_generation_prompt -%}{{ "' + opened.replace("\n", "\\n") + '" }}{%- endif -%}'
    )  # fmt: skip


def user(text="What is rain?"):
    return {"role": "user", "content": text}


def said(text="Water.", **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
SHAPES = {
    "one": {"messages": [user(), said()]},
    "three": {"messages": [user(), said(), user("And snow?"), said("Ice."), user("Thanks"), said("Bye.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user(), said()]},
    "column": {"system": "Brief.", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Yes"}]},
    "tools": {"tools": [{"type": "function", "function": {"name": "weather"}}], "messages": [user(), said()]},
    "call": {"messages": [user(), said(None, tool_calls=[CALL]), {"role": "tool", "content": "wet"}, said("Rain.")]},
    "two answers": {"messages": [user(), said(), said("And ice.")]},
    "ends with a question": {"messages": [user(), said(), user("Why?")]},
    "weights": {"messages": [user(), said("No.", weight=0), user("Sure?"), said("Yes.", train=True)]},
    "parts": {"messages": [user([{"type": "text", "text": "What is"}, {"type": "text", "text": " rain?"}]), said()]},
    "wide characters": {"messages": [user("🌧 ist was?"), said("Wässer — 水。"), user("é"), said(" \n x  ")]},
    "repeated text": {"messages": [user("Water."), said("Water."), user("Water."), said("Water.")]},
}  # fmt: skip
THOUGHT = {
    "messages": [user(), said(reasoning_content="wet"), user("And snow?"), said("Ice.", reasoning_content="cold")]
}
CUT = {"messages": [user(), said("wet</think>Water."), user("And snow?"), said("cold</think>Ice.")]}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_TARGET)


def expected(tokenizer, conversation):
    """(prompt, answer) of each trained answer, by rendering without it and with it."""
    out = []
    for i, message in enumerate(conversation):
        if message["role"] == "assistant" and message.get("weight", 1):
            how = {"tools": conversation.tools, "tokenize": False}
            before = tokenizer.apply_chat_template(conversation[:i], **how, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(conversation[: i + 1], **how)
            before = before if after.startswith(before) else before.removesuffix("<think>")
            assert after.startswith(before)
            out.append((before, after[len(before) :]))
    return out


def pieces(tokenizer, sample):
    """The runs of training tokens of a sample, each with all text before it."""
    groups = itertools.groupby(range(len(sample.ids)), lambda i: sample.mask[i])
    runs = [list(group) for learnt, group in groups if learnt]
    return [(tokenizer.decode(sample.ids[: run[0]]), tokenizer.decode(sample.ids[run])) for run in runs]


def check(tokenizer, row, split):
    conversation, notes = conversation_of(row), []
    samples = render(tokenizer, conversation, notes.append)
    got = [piece for sample in samples for piece in pieces(tokenizer, sample)]
    wanted = expected(tokenizer, conversation)
    assert len(samples) == (len(wanted) if split else 1)
    assert (SPLIT in notes) == split
    assert [before + answer for before, answer in got] == [before + answer for before, answer in wanted]
    # A token may hold spaces at the border of a prompt and its answer.
    assert [answer.strip() for _, answer in got] == [answer.strip() for _, answer in wanted]


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_are_the_answers(tokenizer, form, kind, shape):
    tokenizer.chat_template = template(form, kind)
    check(tokenizer, SHAPES[shape], split=False)


@pytest.mark.parametrize("form", FORMS)
def test_templates_that_rewrite_earlier_turns_give_a_sample_for_each_answer(tokenizer, form):
    tokenizer.chat_template = template(form, "last_thinks")
    check(tokenizer, THOUGHT, split=True)
    check(tokenizer, {"messages": [*THOUGHT["messages"][:3], said("Ice.")]}, split=True)
    tokenizer.chat_template = template(form, "cut")
    check(tokenizer, CUT, split=False)


# What the template below leaves out
FIELDS = {
    "'tools'": SHAPES["tools"],
    "'tool_calls'": {"messages": [user(), said(None, tool_calls=[CALL])]},
    "'reasoning_content'": THOUGHT,
    "'thinking'": {"messages": [user(), said(thinking="wet")]},
    "turn of 'tool'": {"messages": [user(), said(), {"role": "tool", "content": "17 degrees"}, said()]},
    "turn of 'system'": SHAPES["system"],
    "a list of parts": SHAPES["parts"],
}
# What no template could use
RECORDS = {
    "'images'": {"images": ["a.png"], "messages": [user(), said()]},
    "'functions'": {"functions": [{}], "messages": [user(), said()]},
    "'image_url'": {"messages": [user([{"type": "image_url", "image_url": {}}]), said()]},
    "'weight'": {"messages": [user(), said(weight=0.5)]},
    "'train'": {"messages": [user() | {"train": True}, said()]},
    "'tools' is a text that is no JSON": {"tools": "weather", "messages": [user(), said()]},
    "field 'system' and a turn": {"system": "x", **SHAPES["system"]},
    "no place for the field 'system'": {"system": "x", "text": "y"},
    "'tokens'": {"messages": [user(), said(tokens=["a"])]},
}


@pytest.mark.parametrize("named", [*FIELDS, *RECORDS])
def test_what_cannot_be_used_is_refused_by_its_name(tokenizer, named):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}<e>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    if named in RECORDS:
        with pytest.raises(ValueError, match=named):
            conversation_of(RECORDS[named])
        return
    conversation = conversation_of(FIELDS[named])
    with pytest.raises(ValueError, match=named):
        render(tokenizer, conversation)


def test_an_answer_is_learnt_by_its_tokens_and_a_cut_one_without_an_end(tokenizer):
    tokenizer.chat_template = template("phi", "plain")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    words = tokenizer("Water is wet")["input_ids"]
    for tokens, reason in (([*words, end], "stop"), (words, "length")):
        for returned in ({"tokens": tokens}, {}):  # not every server returns them
            row = {"messages": [user(), said("Water is wet", finish_reason=reason, **returned)]}
            (sample,) = render(tokenizer, conversation_of(row))
            assert sample.ids[sample.mask].tolist() == tokens
    notes = []
    (sample,) = render(tokenizer, conversation_of({"messages": [user(), said("Water", tokens=words)]}), notes.append)
    assert tokenizer.decode(sample.ids[sample.mask]) == "Water<|end|>"
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("text", "more", "used"),
    [
        ("Water is wet", [], True),
        ("Wateris wet", [], True),  # as earlier versions wrote it for tokenizers that strip the first space
        ("Snow is cold", [], False),
        ("Water is wet", [-1], False),
        ("Water is wet", [1 << 40], False),
    ],
)
def test_a_plain_text_is_learnt_by_its_tokens_if_they_are_of_this_tokenizer(tokenizer, text, more, used):
    tokens, notes = tokenizer("Water is wet")["input_ids"] + more, []
    (sample,) = render(tokenizer, conversation_of({"text": text, "tokens": tokens}), notes.append)
    assert sample.ids.tolist() == (tokens if used else tokenizer(text)["input_ids"])
    assert notes == [] if used else [RETOKENISED]


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "pieces", "words"])
def test_places_of_tokens_are_exact(tokenizer, tmp_path, kind):
    """A place holds what the token adds to the text, whatever spaces the tokenizer leaves out of its own places."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    texts = ["a  b c", " leading", "trailing ", "Wässer — 水 🌧", "x\n\n y", "<|user|> hi <|end|> "]
    if kind in ("bytes", "trimmed"):
        made = json.loads(tokenizer.backend_tokenizer.to_str())
        if kind == "trimmed":
            made["post_processor"] = {
                "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
            }  # fmt: skip
        fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made)))
    elif kind == "pieces":
        letters = sorted({*"▁abcdefghijklmnopqrstuvwxyz"})
        vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters])}
        inner = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        fast = PreTrainedTokenizerFast(tokenizer_object=inner)
    else:
        inner = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "c": 3, "x": 4, "y": 5}, unk_token="[UNK]"))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        inner.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        fast, texts = PreTrainedTokenizerFast(tokenizer_object=inner), ["a b c", "x  y"]
    for text in texts:
        ids, places = tokens_of(fast, text)
        assert ids == fast(text, add_special_tokens=False)["input_ids"]
        assert [a for a, _ in places[1:]] == [b for _, b in places[:-1]]
        assert (places[0][0], places[-1][1]) == (0, len(text))
