"""Which target and which drafter, and how they are loaded: the settings of every command that decodes."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from specdec.contracts import Drafter
from specdec.drafters.formats import load_drafter
from specdec.machine import PRECISIONS, set_matmul_precision
from specdec.model.checkpoint import DRAFT_DTYPES
from specdec.model.loader import load_target
from specdec.model.names import bundled
from specdec.model.target import Target

DEMO_TARGET = Path(__file__).parent / "demo" / "target"
DEMO_DRAFTER = Path(__file__).parent / "demo" / "mtp"


@dataclass(frozen=True)
class ModelSettings:
    """Which target and which drafter, and how they are loaded.

    Command lines and settings files take their names, types, defaults and help from these fields."""

    target: str | None = field(
        default=None, metadata={"help": "folder or hub name of the target (default: demo/target)"}
    )
    draft: str | None = field(
        default=None,
        metadata={"help": "folder, hub name, demo/NAME, ngram or ngram:suffix (default: demo/mtp)"},
    )
    token_map: Path | None = field(
        default=None, metadata={"help": "the drafter proposes these tokens only (FR-Spec): .json or .pt"}
    )
    feedback: str | None = field(
        default=None,
        metadata={"choices": ("pre", "post"), "help": "of MTP heads in a target: before or after the norm"},
    )
    draft_dtype: str | None = field(
        default=None,
        metadata={
            "choices": tuple(sorted(DRAFT_DTYPES)),
            "metavar": "NAME",
            "help": "of the drafter (default: the target's), or int8",
        },
    )
    allow_nonfinite: bool = field(default=False, metadata={"help": "load weights that hold NaN or Inf"})
    dtype: str = field(default="auto", metadata={"help": "auto (fp32 on the CPU, else the target's), fp32, fp16, bf16"})
    matmul_precision: str | None = field(
        default=None,
        metadata={
            "choices": PRECISIONS,
            "metavar": "NAME",
            "help": "of fp32 products: highest (default), high, medium (rows in bf16)",
        },
    )
    device: str = field(default="cpu", metadata={"help": "cpu (default), cuda, cuda:1, ..."})
    tp_plan: str | None = field(
        default=None,
        metadata={"choices": ("auto",), "help": "auto: the processes of torchrun share the target (docs/scale.md)"},
    )
    device_map: str | None = field(
        default=None, metadata={"help": "auto: spread the target over GPUs, memory and disk; or a .json file"}
    )

    def __post_init__(self) -> None:
        for name in ("target", "draft"):
            if getattr(self, name) is not None and not str(getattr(self, name)).strip():
                raise ValueError(f"{name} is empty: is a variable not set? Give a folder, a hub name, or None")

    def check_pair(self, otherwise: str = "") -> None:
        """Raise ValueError for a target without a drafter: the demo's fits no other. otherwise: what else helps."""
        demo = self.target is None or Path(bundled(self.target)) == DEMO_TARGET
        if not demo and self.draft is None:
            raise ValueError(f"a target of your own needs its drafter: give --draft{otherwise}")

    def load_target(self) -> Target:
        """The target. A precision of products that is given holds for the whole process from now on."""
        set_matmul_precision(self.matmul_precision)
        how = {"dtype": self.dtype, "device": self.device, "allow_nonfinite": self.allow_nonfinite}
        return load_target(self.target or DEMO_TARGET, **how, tp_plan=self.tp_plan, device_map=self.device_map)

    def load_drafter(self, target: Target) -> Drafter:
        return load_drafter(
            self.draft or DEMO_DRAFTER,
            target,
            token_map=self.token_map,
            feedback=self.feedback,
            dtype=self.draft_dtype or None,
            allow_nonfinite=self.allow_nonfinite,
        )


ONE_PROCESS = tuple(f.name for f in fields(ModelSettings) if f.name != "tp_plan")  # for commands that run in one
