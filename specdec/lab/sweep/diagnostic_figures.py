"""The figure of a sweep's report that says why drafters are accepted as often as they are."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.lab.figure_style import WIDTH, error_bars, looks_of, subplots
from specdec.lab.sweep.results import Results, best, by_drafter, tree_name


def diagnostics(points: Results) -> Figure | None:
    """Calibration, entropy, norms of hidden states, and context, of each drafter's point with the greatest tau."""
    figure, axes = subplots(2, 2, figsize=(WIDTH, 6.4))
    chosen = {name: best(mine) for name, mine in by_drafter(points).items()}
    for name, r in chosen.items():
        told, looks = r["diagnostics"], looks_of(name, chosen)
        label = f"{name}, {tree_name(r)}"
        _sized(axes[0, 0], told["calibration"]["bins"], "draft", "-", looks)
        axes[0, 0].plot([], [], label=label, **looks)
        for which, line in (("target", "-"), ("draft", ":")):
            _sized(axes[0, 1], told.get("entropy", {}).get(which, []), "entropy", line, looks)
        _norms(axes[1, 0], told.get("norms", []), looks)
        bins = told["context"]
        axes[1, 1].errorbar(
            [f"{b['from']}–{b['to'] - 1}" if b["to"] else f"{b['from']}–" for b in bins],
            [b["value"] for b in bins], error_bars(bins), capsize=2, **looks,
        )  # fmt: skip
    axes[0, 0].plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
    titles = ("Calibration", "Entropy", "Hidden state", "Context")
    xs = ("probability under the drafter", "entropy, nats", "draft step", "tokens before the round")
    ys = ("share accepted", "share accepted", "norm, to that of step 0", "tau")
    for axis, title, x, y in zip(axes.flat, titles, xs, ys, strict=True):
        axis.set(title=title, xlabel=x, ylabel=y)
    axes[0, 1].plot([], [], color="#555555", label="of the target")
    axes[0, 1].plot([], [], color="#555555", linestyle=":", label="of the drafter, at the root")
    axes[0, 1].legend()
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _sized(axis: Axes, bins: list[dict], x: str, line: str, looks: dict) -> None:
    """Draw the share accepted by x. The more a bin holds, the larger its marker."""
    places, shares = [b[x] for b in bins], [b["accepted"] for b in bins]
    most = max((b["count"] for b in bins), default=1)
    axis.plot(places, shares, color=looks["color"], linestyle=line, linewidth=1)
    axis.scatter(places, shares, [8 + 60 * b["count"] / most for b in bins], **looks, linewidth=0)
    axis.set_ylim(0, 1.04)


def _norms(axis: Axes, norms: list[dict], looks: dict) -> None:
    if not norms:
        return
    unit, steps = norms[0]["mean"], [n["step"] for n in norms]
    axis.plot(steps, [n["mean"] / unit for n in norms], **looks)
    low, high = [n["low"] / unit for n in norms], [n["high"] / unit for n in norms]
    axis.fill_between(steps, low, high, color=looks["color"], alpha=0.15, linewidth=0)
