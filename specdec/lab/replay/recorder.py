"""Record once what a drafter proposes along texts of the target, and know what any tree accepts.

    superset = record(target, drafter, prompts, topks=(2, 4, 8), steps=6)
    superset.save("runs/superset")
    Superset.load("runs/superset").replay(TreeSpec(4, 5, 16)).tau

docs/replay.md says what is exact, and in what sense.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.recorder import describe, versions
from specdec.lab.replay.along import DraftingAlong, Restricted
from specdec.lab.replay.recording import RecordedText
from specdec.lab.replay.superset import Superset
from specdec.model.target import check_taps
from specdec.structs import Sampling
from specdec.text import encode_prompt


@torch.inference_mode()
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
    vocabularies: Mapping[str, Tensor] | None = None,
    batch: int = 32,
) -> Superset:
    """Decode the prompts plainly, `samples` times each, and draft behind every token of the texts.

    Drafted are all candidates of `steps` levels for each of `topks`, and the text itself. Of a block whose slots do not
    depend on each other's tokens the best of each slot are kept too, as many as the largest of `topks`.

    prompts: token ids, or texts as `specdec.generate` takes them. outputs: texts of the target to take instead of
    decoding, one for each prompt; an end-of-text token or max_new_tokens ended them. seed: text number i, whether it is
    decoded here or given, has the seed (seed, i). children: which above temperature 0, coupled or likeliest; coupled
    ones depend on the seed that the texts were drawn by. vocabularies: target ids [U'] by name, for FR-Spec's
    restriction of the drafter (`drafters.layers.restrict`). Each is recorded beside the drafter's own vocabulary, whose
    name is ''. batch: texts, and pieces of texts, that run at once.

    Raises ValueError for what does not fit.
    """
    sampling, eos = sampling or Sampling(), target.eos if eos is None else eos
    drafters = _drafters(drafter, vocabularies or {}, target.device)
    _check(target, drafters, prompts, topks, steps, sampling)
    if children not in ("coupled", "likeliest"):
        raise ValueError(f"what is recorded are coupled or likeliest children, not {children!r}")
    prompts = [encode_prompt(target, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if outputs is None:
        questions = [q for _ in range(samples) for q in range(len(prompts))]
        outputs = _decode(target, [prompts[q] for q in questions], max_new_tokens, sampling, seed, eos, batch)
    else:
        questions = list(range(len(prompts)))
        if [len(outputs), *(len(o) for o in outputs if not 1 <= len(o) <= max_new_tokens)] != [len(prompts)]:
            raise ValueError(f"each of the {len(prompts)} prompts needs one output, of 1 to {max_new_tokens} tokens")
    texts = _texts(target, questions, [prompts[q] for q in questions], outputs, steps, sampling, seed, batch)
    coupled = None if sampling.greedy or children != "coupled" else [(seed, number) for number in range(len(texts))]
    drafting = DraftingAlong(target, drafters, texts, sorted(set(topks)), steps, sampling, eos, coupled)
    drafting.run(batch)
    settings = describe(target, None, None, None) | {
        "drafter": {"class": type(drafter).__name__} | dict(drafter.conventions),
        "block": drafter.block,
        "vocabularies": {name: d.vocab.size for name, d in drafters.items()},
        "samples": samples,
        "children": "likeliest" if coupled is None else children,
        "seed": seed,
        "versions": versions(),
    }
    found = drafting.candidates, drafting.along, drafting.p, drafting.marginals
    return Superset(steps, max_new_tokens, sampling, texts, *found, settings)


def _drafters(drafter: Drafter, vocabularies: Mapping[str, Tensor], device: torch.device) -> dict[str, Drafter]:
    """By the name of the vocabulary; the drafter itself first."""
    if "" in vocabularies:
        raise ValueError("a vocabulary needs a name: '' is the drafter's own")
    return {"": drafter} | {name: Restricted(drafter, ids.to(device)) for name, ids in vocabularies.items()}


def _check(
    target, drafters: Mapping[str, Drafter], prompts: Sequence, topks: Sequence[int], steps: int, sampling: Sampling
) -> None:
    drafter = drafters[""]
    if sampling.penalised:
        raise ValueError("texts under penalties cannot be replayed: what a node may be followed by depends on its path")
    check_taps(drafter.taps, target.config.layers)
    if not topks or min(topks) < 1 or steps < 1:
        raise ValueError(f"topks and steps must be at least 1, got topks {list(topks)} and steps {steps}")
    if (most := drafter.deepest(steps)) < steps:
        raise ValueError(f"steps is {steps}, but this drafter guesses {most} tokens ahead at most")
    if drafter.conditioned and len(drafters) > 1:
        raise ValueError(
            "what a conditional head says of a restricted vocabulary is not recorded: restrict the drafter"
        )
    size = min(d.vocab.size for d in drafters.values())
    if max(topks) > size:
        raise ValueError(f"topk is {max(topks)}, but a draft vocabulary has {size} tokens only")
    if not prompts:
        raise ValueError("no prompt was given")


def _decode(target, prompts, new: int, sampling: Sampling, seed: int, eos, batch: int) -> list[list[int]]:
    """What the target says to each prompt, without a drafter; number i has the seed (seed, i)."""
    engine, out = Engine(target), []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        seeds = [(seed, first + row) for row in range(len(some))]
        rows = engine.generate(some, max_new_tokens=new, sampling=sampling, seed=seeds, eos=eos).rows
        out += [row.tokens for row in rows]
    return out


def _texts(
    target, questions, prompts, outputs, steps: int, sampling: Sampling, seed: int, batch: int
) -> list[RecordedText]:
    """The outputs, and what the target says behind them. Raises ValueError if there is no round to replay."""
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, whole)) + steps
    if longest > target.config.context:
        raise ValueError(
            f"a text and the {steps} tokens drafted behind it take {longest} places, the target's context has "
            f"{target.config.context}: decode fewer new tokens"
        )
    beyond = _decode(target, whole, steps, sampling, seed, frozenset(), batch)  # by the noise of these positions
    texts = [RecordedText(*parts) for parts in zip(questions, prompts, outputs, beyond, strict=True)]
    if not any(text.roots for text in texts):
        raise ValueError("there is no round to replay: every text ends with its first token")
    return texts
