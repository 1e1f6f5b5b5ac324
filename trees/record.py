"""Record once what a drafter proposes along texts of the target, and know what any tree accepts.

    recording = record(target, drafter, prompts, topks=(2, 4, 8), steps=6)
    recording.save("runs/recording")
    Recording.load("runs/recording").replay(DynamicTree(4, 5, 16)).tau

docs/replay.md says what is exact, and in what sense.
"""

from collections.abc import Sequence

from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.recorder import describe, versions
from specdec.model.target import check_taps
from specdec.recording import Recording, Text
from specdec.structs import Sampling
from specdec.text import encode_prompt
from specdec.trees.along import BATCH, Drafting


def record(
    target,
    drafter: Drafter,
    prompts: Sequence[str | list[int]],
    *,
    topks: Sequence[int],
    steps: int,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    children: str = "coupled",
    samples: int = 1,
    seed: int = 0,
    eos: frozenset[int] | None = None,
    outputs: Sequence[list[int]] | None = None,
    batch: int = BATCH,
) -> Recording:
    """Decode the prompts plainly, `samples` times each, and draft after every token of the texts.

    Drafted are all candidates of `steps` levels for each of `topks`, and the text itself. Of a block whose slots do not
    depend on each other's tokens the best of each slot are recorded too, as many as the largest of `topks`.

    Args:
        prompts: Token ids, or texts as `specdec.generate` takes them.
        outputs: Texts of the target to take instead of decoding, one for each prompt; an end-of-text token or
            max_new_tokens ended them.
        seed: Text number i, whether it is decoded here or given, has the seed (seed, i).
        children: Which children above temperature 0, coupled or likeliest; coupled ones depend on the seed that the
            texts were drawn by.
        batch: Texts, and pieces of texts, that run at once.

    Raises:
        ValueError: For what does not fit.
    """
    sampling, eos = sampling or Sampling(), target.eos if eos is None else eos
    _check(target, drafter, prompts, topks, steps, sampling)
    if children not in ("coupled", "likeliest"):
        raise ValueError(f"what is recorded are coupled or likeliest children, not {children!r}")
    prompts = [encode_prompt(target, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if outputs is None:
        questions = [q for _ in range(samples) for q in range(len(prompts))]
        outputs = decode(target, [prompts[q] for q in questions], max_new_tokens, sampling, seed, eos, batch)
    else:
        questions = list(range(len(prompts)))
        if [len(outputs), *(len(o) for o in outputs if not 1 <= len(o) <= max_new_tokens)] != [len(prompts)]:
            raise ValueError(f"each of the {len(prompts)} prompts needs one output, of 1 to {max_new_tokens} tokens")
    texts = _texts(target, questions, [prompts[q] for q in questions], outputs, steps, sampling, seed, batch)
    coupled = children == "coupled" and not sampling.greedy
    drafting = Drafting(target, drafter, texts, steps, sampling, coupled, sorted(set(topks)), eos)
    settings = describe(target, None, None, None) | {
        "drafter": {"class": type(drafter).__name__} | dict(drafter.conventions),
        "block": drafter.block,
        "vocabulary": drafter.vocab.size,
        "samples": samples,
        "children": "coupled" if coupled else "likeliest",
        "seed": seed,
        "versions": versions(),
    }
    return Recording(steps, max_new_tokens, sampling, texts, drafting.run(batch), settings)


def record_ranks(target, drafter: Drafter, texts: list[Text], steps: int, sampling: Sampling) -> Recording:
    """Record no more than chains, static trees and `acceptance.json` need: the ranks of the texts' own tokens, on
    `steps` levels or as many as the drafter goes deep. Above temperature 0 the children are coupled ones."""
    steps = drafter.deepest(steps)
    tensors = Drafting(target, drafter, texts, steps, sampling, not sampling.greedy).run()
    return Recording(steps, max(len(text.tokens) for text in texts), sampling, texts, tensors)


def answers_to(target, prompts: list[list[int]], temperature: float, max_new_tokens: int, seed: int = 0) -> list[Text]:
    """Let the target answer prompts (token ids) plainly. Number i has the seed (seed, i)."""
    tokens = decode(target, prompts, max_new_tokens, Sampling(temperature), seed, target.eos)
    return [
        Text(i, prompt, answer, seed=(seed, i)) for i, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True))
    ]


def _check(target, drafter: Drafter, prompts: Sequence, topks: Sequence[int], steps: int, sampling: Sampling) -> None:
    if sampling.penalised:
        raise ValueError("texts under penalties cannot be replayed: what a node may be followed by depends on its path")
    check_taps(drafter.taps, target.config.layers)
    if not topks or min(topks) < 1 or steps < 1:
        raise ValueError(f"topks and steps must be at least 1, got topks {list(topks)} and steps {steps}")
    if (most := drafter.deepest(steps)) < steps:
        raise ValueError(f"steps is {steps}, but this drafter guesses {most} tokens ahead at most")
    if max(topks) > (size := drafter.vocab.size):
        raise ValueError(f"topk is {max(topks)}, but the draft vocabulary has {size} tokens only")
    if not prompts:
        raise ValueError("no prompt was given")


def decode(
    target, prompts: list[list[int]], new: int, sampling: Sampling, seed: int, eos: frozenset[int], batch: int = BATCH
) -> list[list[int]]:
    """Return what the target says to each prompt, without a drafter; number i has the seed (seed, i)."""
    engine, out = Engine(target), []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        seeds = [(seed, first + row) for row in range(len(some))]
        rows = engine.generate(some, max_new_tokens=new, sampling=sampling, seed=seeds, eos=eos).rows
        out += [row.tokens for row in rows]
    return out


def _texts(target, questions, prompts, outputs, steps: int, sampling: Sampling, seed: int, batch: int) -> list[Text]:
    """The outputs, and what the target says after them. Raises ValueError if there is no round to replay."""
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, whole)) + steps
    if longest > target.config.context:
        raise ValueError(
            f"a text and the {steps} tokens drafted behind it take {longest} places, the target's context has "
            f"{target.config.context}: decode fewer new tokens"
        )
    beyond = decode(target, whole, steps, sampling, seed, frozenset(), batch)  # by the noise of these positions
    parts = zip(questions, prompts, outputs, beyond, strict=True)
    texts = [Text(*of_text, seed=(seed, number)) for number, of_text in enumerate(parts)]
    if not any(text.roots for text in texts):
        raise ValueError("there is no round to replay: every text ends with its first token")
    return texts
