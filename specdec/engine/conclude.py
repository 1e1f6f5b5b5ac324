"""From a round that was read to its report."""

from specdec.engine.clock import Clock
from specdec.engine.guide import Guide
from specdec.engine.overlap import ReadRound
from specdec.engine.report import RoundReport


def conclude(read: ReadRound, clock: Clock, guide: Guide | None, captured: bool = False) -> RoundReport:
    """Add what a round emitted to its sequences, and tell of it. captured: a round was recorded in this step."""
    emitted, accepted, levels = [], [], read.levels
    for i, (row, count) in enumerate(zip(read.sequences, read.counts, strict=True)):
        if row.finish is not None:
            emitted.append([])
            accepted.append(0)
            continue
        row.trace.accepted.append(count - 1)
        row.trace.undrafted += read.output.nodes == 1 or (levels is not None and levels[i] == 0)
        told = (None if x is None else x[i] for x in (read.logprobs, read.likely, read.likely_logprobs))
        kept = row.add(read.tokens[i][:count], *told)
        row.trace.emitted.append(len(kept))
        emitted.append(kept)
        accepted.append(min(count - 1, len(kept)))
    out = read.output
    if out.played is not None:
        guide.learn(out.played, read.counts)
    clock.mark("host")
    report = RoundReport(read.sequences, emitted, accepted, read.sampling, clock)
    report.tree, report.verdict, report.logits, report.logprobs = out.tree, out.verdict, out.logits, read.logprobs
    report.levels, report.experts, report.nodes = levels, out.experts, out.nodes
    report.captured = captured
    return report
