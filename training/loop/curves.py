"""The log of a run as a picture: losses, agreement with the target, tau and gradient norm over steps."""

from pathlib import Path

from specdec.cli.files import write_whole
from specdec.training.loop.log import read_log


def draw_curves(log: Path, picture: Path) -> None:
    """Draw a log.jsonl into a PNG."""
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    rows = read_log(log)
    figure = Figure(figsize=(11, 7))
    # Fixed: to work the layout out took a third of the time, and a picture is drawn with each checkpoint.
    figure.subplots_adjust(left=0.06, right=0.99, bottom=0.07, top=0.95, wspace=0.15, hspace=0.2)
    loss, accuracy, tau, norm = figure.subplots(2, 2, sharex=True).flat
    for split in ("train", "heldout"):
        _plot(loss, rows, split, "loss", split)
    for j in range(max((len(r.get("accuracy", ())) for r in rows), default=0)):
        _plot(accuracy, rows, "heldout", "accuracy", f"step {j + 1}", at=j)
    _plot(tau, rows, "decode", "tau", "decoding held-out prompts")
    _plot(tau, rows, "rollout", "tau", "on-policy rollouts")
    _plot(tau, rows, "heldout", "expected_tau", "expected, greedy")
    _plot(tau, rows, "heldout", "expected_tau_sampled", "expected, sampled")
    _plot(norm, rows, "train", "gradient_norm", "before clipping")
    titles = ("loss", "held-out agreement with the target", "tau (tokens a round)", "gradient norm")
    for axes, title in zip((loss, accuracy, tau, norm), titles, strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    write_whole(picture, lambda aside: figure.savefig(aside, dpi=110, format="png"))


def _plot(axes, rows: list[dict], split: str, key: str, label: str, at: int | None = None) -> None:
    chosen = [r for r in rows if r["split"] == split and key in r]
    if chosen:
        values = [r[key] if at is None else r[key][at] for r in chosen]
        axes.plot([r["step"] for r in chosen], values, label=label, marker="." if len(chosen) < 30 else None)
