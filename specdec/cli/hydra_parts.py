"""Words of Hydra's commands that name parts of the user's own, such as drafter=my.py:create (`specdec.own`)."""

import re
from collections.abc import Sequence

from specdec import own, registry
from specdec.cli.hydra_words import bare

GIVEN = ("target", "vocab")  # arguments that the trainer gives to a drafter


def own_parts(words: Sequence[str]) -> list[str]:
    """The words with each own part as a name that Hydra knows from now on, with the part's arguments as settings.

    Raises:
        ValueError: A file, or a class or function in it, does not exist or does not take what it must.
    """
    found = []
    for word in words:
        group, _, text = word.partition("=")
        text = bare(text)
        known = group not in own.POINTS or text in registry.names(group)
        part = None if known or not (own.is_own(text) or re.fullmatch(r"[\w-]+", text)) else own.find(group, text)
        found.append(word if part is None else f"{group}={_store(group, text, part)}")
    return found


def _store(group: str, text: str, part) -> str:
    """Tell Hydra of a part, and return the name that it has there."""
    from hydra.core.config_store import ConfigStore

    code, checkpoint = own.split(text)
    if checkpoint is not None:
        raise ValueError(f"{group}={text} names a checkpoint: give from={text} to train it further")
    settings = own.settings_of(code, part, *(GIVEN if group == "drafter" else ()))
    if group == "drafter":
        own.check_arguments(code, part, None, vocab=None)
        settings = {"draft_vocab_size": None} | settings
    name = re.sub(r"\W+", "_", own.short(code).replace(".py:", "_")) + ("_" if own.is_own(code) else "")
    ConfigStore.instance().store(group=group, name=name, node={"_target_": code} | settings)
    return name
