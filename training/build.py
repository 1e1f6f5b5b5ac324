"""Build the parts of a run from the groups of its configuration."""

from typing import Any, cast

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from specdec import own, registry
from specdec.cli.hydra_words import bare, quoted
from specdec.contracts import Drafter
from specdec.drafters.formats.further import family_at
from specdec.drafters.vocab import DraftVocab, fitting_size, most_frequent
from specdec.model.language_model import LanguageModel
from specdec.training.data import Sample, count_tokens
from specdec.training.objectives.base import Objective
from specdec.verify.walk import Rule

BASES = {"drafter": Drafter, "objective": Objective, "verifier": Rule}  # what own code must make


def instantiate(settings, group: str = "", **extra):
    """Call Hydra's `instantiate`, or make a part of `group` from the user's own code; all errors are ValueErrors."""
    named = settings.get("_target_")
    if group in BASES and (own.is_own(named) or "." not in named):
        given = OmegaConf.to_container(settings, resolve=True) if isinstance(settings, DictConfig) else dict(settings)
        plain = cast(dict[str, Any], given)
        return own.make(plain.pop("_target_"), registry.named(group, named), BASES[group], **plain, **extra)
    try:
        return hydra.utils.instantiate(settings, **extra)
    except InstantiationException as error:
        raise ValueError(str(error.__cause__ or error)) from None


def draft_vocabulary(size: int | str | None, samples: list[Sample], target: LanguageModel) -> DraftVocab:
    """Return the `size` most frequent training tokens; `auto` is `fitting_size`, and null the whole vocabulary."""
    vocab = target.vocab
    count = fitting_size(target.config) if isinstance(size, str) else size
    if count is None or count >= vocab:
        return DraftVocab(vocab)
    counts = count_tokens(samples, vocab)
    chosen = most_frequent(counts, count)
    covered = counts[chosen.ids].sum() / counts.sum()
    print(f"draft vocabulary: {count} of {vocab} tokens cover {covered:.2%} of the data")
    return chosen


def build_drafter(config: DictConfig, target: LanguageModel, samples: list[Sample], seed: int) -> Drafter:
    """Build a drafter as a configuration of conf/drafter describes it. Raises ValueError if that does not learn."""
    settings = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    vocab = draft_vocabulary(settings.pop("draft_vocab_size", None), samples, target)
    torch.manual_seed(seed)
    drafter = instantiate(settings, "drafter", target=target, vocab=vocab)
    if not drafter.learns:
        raise ValueError(
            f"{config._target_} makes a drafter that does not learn: decode with it, or train another, such as "
            "drafter=eagle3_1"
        )
    if drafter.recipe is None:  # a drafter without a published layout is saved with it
        drafter.recipe = settings | {"_target_": own.short(settings["_target_"])}
    return drafter


def from_checkpoint(words: list[str]) -> list[str]:
    """Replace from=CHECKPOINT in the words of a command by the settings that it stands for.

    These are the drafter as it was saved, and the objective of its family unless the words name one. Raises ValueError
    if there is no such drafter, if it does not learn, or if a setting describes another one.
    """
    given = [word.partition("=") for word in words]
    path = next((bare(value) for name, _, value in reversed(given) if name == "from"), None)
    if path is None or path == "null":
        return words
    if not path.strip():
        raise ValueError("from is empty: give the folder or hub name of a drafter")
    for name, _, value in given:
        if name.lstrip("+~").partition(".")[0] == "drafter":
            raise ValueError(f"from={path} takes the drafter as it was saved: leave out {name}={bare(value)}")
    objective = [] if any(name == "objective" for name, _, _ in given) else [f"objective={family_at(path).objective}"]
    return [*words, "drafter=saved", f"drafter.path={quoted(path)}", *objective]
