"""Which target and which drafter, and how they are loaded: the settings of every command that decodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.model.names import DEMO, draft_for

if TYPE_CHECKING:  # commands read these settings before torch is loaded
    from specdec.contracts import Drafter
    from specdec.model.language_model import LanguageModel

DEMO_TARGET, DEMO_DRAFTER = DEMO / "target", DEMO / "mtp"


@dataclass(frozen=True)
class ModelSettings:
    """Which target and which drafter, and how they are loaded. Command lines and settings files use these fields."""

    target: str | None = None
    draft: str | None = None
    token_map: Path | None = None
    feedback: str | None = None
    draft_dtype: str | None = None
    allow_nonfinite: bool = False
    dtype: str = "auto"
    matmul_precision: str | None = None
    device: str = "cpu"
    tp_plan: str | None = None
    device_map: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an empty name of the target or of the drafter."""
        for name in ("target", "draft"):
            if getattr(self, name) is not None and not str(getattr(self, name)).strip():
                raise ValueError(f"{name} is empty: is a variable not set? Give a folder, a hub name, or None")

    def check_pair(self, otherwise: str = "") -> None:
        """Raise ValueError for a target without a drafter, given or bundled. otherwise: what else helps."""
        draft_for(self.target, self.draft, otherwise)

    @property
    def drafter(self) -> str:
        """Return the name of the drafter that is loaded."""
        return draft_for(self.target, self.draft)

    def load_target(self) -> "LanguageModel":
        """Load the target. A given precision of products holds for the whole process from now on."""
        from specdec.machine import set_matmul_precision
        from specdec.model.loader import load_target

        set_matmul_precision(self.matmul_precision)
        names = ("dtype", "device", "allow_nonfinite", "tp_plan", "device_map")
        how: dict[str, Any] = {name: getattr(self, name) for name in names}
        return load_target(self.target or DEMO_TARGET, **how)

    def load_drafter(self, target: "LanguageModel") -> "Drafter":
        """Load the drafter for this target, with its token map, feedback and dtype."""
        from specdec.drafters.formats import load_drafter

        how: dict[str, Any] = {name: getattr(self, name) for name in ("token_map", "feedback", "allow_nonfinite")}
        return load_drafter(self.drafter, target, dtype=self.draft_dtype or None, **how)
