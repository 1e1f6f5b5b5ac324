"""The rows that rounds compute. Sequences join a batch, and rows whose sequence has ended are dropped from it.

Compacting a batch moves what is kept of its last rows to the places of those that have ended (`Survivors`). That costs
a part of a round. Whether it pays depends on when the other rows end, which nobody knows. The rule is therefore the
online one of Dooly, Goldman and Scott ("TCP dynamic acknowledgment delay", STOC 1998): carry ended rows until that has
cost as much as compacting would. It costs at most about twice as much as the best choice in hindsight.

The rule counts rounds and not seconds, so a run can be repeated. It takes a row's end into account one round late, as a
loop must that reads rounds late (`overlap.Loop`). So both loops drop the same rows before the same rounds.
"""

from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.adaptive import Policy
from specdec.engine.clock import Clock
from specdec.engine.guide import Guide
from specdec.engine.prefill import Reading
from specdec.engine.report import Reads
from specdec.engine.round import Round, RoundOutput, RoundSettings
from specdec.engine.sequence import MOST_LIKELY, Masks, Sequence
from specdec.sampling.filters import settings_of
from specdec.sampling.penalties import Penalties
from specdec.structs import Sampling, SamplingBatch, Survivors

PRICE = 0.25  # Cost of compacting a batch, in rounds; measured 0.2 to 0.07 of a plain round of 4 to 32 rows.


def eos_of(sequences: abc.Sequence[Sequence], device: torch.device) -> Tensor:
    """[B,E] the `eos` ids of these rows; who has fewer than another has -1, which is no token, in the other places."""
    width = max((len(s.eos) for s in sequences), default=0)
    eos = [sorted(s.eos) + [-1] * (width - len(s.eos)) for s in sequences]
    return torch.tensor(eos, dtype=torch.int64, device=device).view(len(sequences), width)


class Progress:
    """How far the rows are, on the device. It ends a row by the rule of `Sequence.add`."""

    def __init__(self, sequences: abc.Sequence[Sequence], device: torch.device):
        self.eos = eos_of(sequences, device)
        self.active = torch.tensor([s.finish is None for s in sequences], device=device)  # [B] which still decode
        self.left = torch.tensor([s.left for s in sequences], device=device)  # [B] how many tokens each may add

    def compact(self, index: Tensor) -> None:
        """Go on with the rows index [B'] only."""
        self.active, self.left, self.eos = self.active[index], self.left[index], self.eos[index]

    def settle(self, tokens: Tensor, n: Tensor) -> None:
        """A round emitted the first n [B] of tokens [B,P]. Changes both tensors in place."""
        kept = torch.where(self.active, n.minimum(self.left), 0)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (tokens[..., None] == self.eos[:, None]).any(-1) & (place < kept[:, None])
        self.left -= kept
        self.active &= ~ends.any(1) & (self.left > 0)


def penalties_of(sequences: abc.Sequence[Sequence], vocab: int, device: torch.device) -> Penalties | None:
    """The penalties of these rows as the host knows their texts; None if no row has any."""
    samplings = [s.sampling for s in sequences]
    if not any(sampling.penalised for sampling in samplings):
        return None
    return Penalties(samplings, [s.prompt for s in sequences], vocab, device, [s.tokens for s in sequences])


class Batch:
    """What rounds work on, and what one round leaves to the next.

    Row b holds `sequences[b]`. Rows whose sequence has ended stay until they are dropped; then the last rows take their
    places. New sequences join behind the others.
    """

    def __init__(
        self,
        round_: Round,
        rows: int,
        room: int,
        clock: Clock,
        *,
        overlap: bool = False,
        compact: bool = True,
        abstain: bool = True,
        adaptive: Policy | None = None,
    ):
        """Make room for `rows` sequences of up to `room` tokens. overlap: rounds are launched before the last one is
        read, so the device ends rows by itself. compact: drop rows that have ended. abstain: draft no more levels than
        the drafter has something to propose for. adaptive: chooses the trees of rounds."""
        self.round, self.rows, self.room = round_, rows, room
        self.overlap, self.compact, self.abstain = overlap, compact, abstain
        self.clock = clock
        self.cache = round_.target.new_cache(rows, round_.target_slots(room)).clear(0)
        if round_.drafter is not None:
            round_.drafter.reset(rows, round_.draft_slots(room))
        self.guide = Guide(adaptive, round_.drafter) if adaptive is not None else None
        self.sequences: list[Sequence] = []
        self.root: Tensor | None = None  # [B]
        self.state: DraftState | None = None
        self.progress: Progress | None = None
        self.settings: RoundSettings | None = None
        self.carried = 0.0  # cost of the ended rows since the last compaction, in rounds, the next one included
        self.known_going = 0  # rows that `progress.active` lets go on; without overlap the host keeps it so
        self.reads = Reads.LOGITS  # what is read of rounds
        self.captured = False  # a round was recorded in this step
        self.reading: Reading | None = None  # reads long prompts in parts

    @property
    def device(self) -> torch.device:
        return self.cache.lens.device

    def going(self) -> list[Sequence]:
        """Those that the host does not know to have ended."""
        return [s for s in self.sequences if s.finish is None]

    def free(self) -> int:
        """How many sequences can join."""
        return self.rows - len(self.going())

    # Joining and leaving: between rounds of which none is unread

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill sequences, no more than are free, and add to each its first token. This waits for the device."""
        self._drop([s.finish is not None for s in self.sequences])
        try:
            root, state, settings = self._prefill(sequences, len(self.sequences))
        except BaseException:
            self._undo_prefill()
            raise
        self.root = root if self.root is None else torch.cat([self.root, root])
        self.state = state if self.state is None else self.state.joined(state)
        self.sequences = self.sequences + sequences
        if self.guide is not None:
            self.guide.joined(len(self.sequences) - len(sequences), len(sequences))
        self._refresh(settings if len(self.sequences) == len(sequences) else self._settings(self.sequences))
        self.clock.mark("prefill")

    def _prefill(self, sequences: list[Sequence], row: int) -> tuple[Tensor, DraftState | None, RoundSettings]:
        """Also returns the settings of these rows alone, their first tokens counted."""
        settings = self._settings(sequences)
        prompts = [s.prompt for s in sequences]
        root, state, told = self.round.prefill(prompts, self.cache, row, settings, self.guide, self.reading)
        told = {name: x.tolist() for name, x in told.items()}
        for i, (sequence, token) in enumerate(zip(sequences, root.tolist(), strict=True)):
            sequence.add([token], **{name: [x[i]] for name, x in told.items()})
        return root, state, settings

    def _undo_prefill(self) -> None:
        """Take rows out of the caches that a prefill which failed has put there."""
        drafter, known = self.round.drafter, Survivors([False] * len(self.sequences), self.device)
        self.cache.compact(known)
        if self.state is not None:
            drafter.compact(known)
        elif drafter is not None:
            drafter.reset(self.rows, self.round.draft_slots(self.room))

    def _settings(self, sequences: abc.Sequence[Sequence]) -> RoundSettings:
        return RoundSettings(
            self._sampling(sequences),
            self.round.noise([s.seed for s in sequences]),
            self.clock,
            penalties_of(sequences, self.round.target.config.vocab, self.device),
            Masks(sequences) or None,
            any(s.logprobs is not None for s in sequences),
            min(MOST_LIKELY, self.round.target.vocab) if any(s.top for s in sequences) else 0,
            self._steps(sequences),
        )

    def _sampling(self, sequences: abc.Sequence[Sequence]) -> Sampling | SamplingBatch:
        return settings_of([s.sampling for s in sequences], self.device)

    def _steps(self, sequences: abc.Sequence[Sequence]) -> Tensor | None:
        """[B] how many levels count for each row; None if all do for all."""
        if self.round.policy is None or all(s.steps is None for s in sequences):
            return None
        most = self.round.policy.steps
        return torch.tensor([most if s.steps is None else min(s.steps, most) for s in sequences], device=self.device)

    def _refresh(self, settings: RoundSettings) -> None:
        """Take the settings of all rows, and make anew what else follows from what the host knows of them."""
        self.settings, self.progress = settings, Progress(self.sequences, self.device)
        self.known_going = len(self.going())

    def stop(self) -> None:
        """Let rows stand still that the host knows to have ended, and the device may not."""
        if self.progress is not None:
            going = [s.finish is None for s in self.sequences]
            self.progress.active &= torch.tensor(going, dtype=torch.bool, device=self.device)

    def rest(self) -> None:
        """Drop all rows, none of which decodes, and what was kept for them."""
        self._drop([True] * len(self.sequences))
        if self.guide is not None:
            self.guide.forget()

    # Rounds

    def launch(self, max_len: int, ended: abc.Collection[Sequence]) -> RoundOutput:
        """Start the next round. No sequence that still decodes has committed more than `max_len` tokens; `ended` are
        those that have ended, as far as the decision to drop them may know."""
        if ended:
            self._shed([s in ended for s in self.sequences])
        if not self.overlap and (going := len(self.going())) != self.known_going:
            self.known_going = going
            self.stop()
        self.cache.max_len = max_len
        active = self.progress.active
        planned = self._plan()
        levels = self.round.proposed(self.state) if self.abstain and planned != 0 else None
        most, asked = self._deepest(levels), self.settings.steps
        if asked is not None:
            levels = asked if levels is None else torch.minimum(levels, asked)
            most = min(most, self._asked()) if most is not None else self._asked()
        if planned is not None:
            most = planned if most is None else min(planned, most)
            levels = None if levels is None else levels.clamp(max=most)
        itself = self._itself() if self.overlap and (most == 0 or self.guide is not None) else None
        self.root, self.state, output = self.round.play(
            self.root, self.state, self.cache, active, self.settings, itself, levels, most, self.guide
        )
        output.played = self.guide and self.guide.played
        if self.overlap:
            self.progress.settle(output.tokens, output.n)
        return output.only(self.reads)

    def _plan(self) -> int | None:
        """How many levels an adaptive policy lets the drafter draft; None without one. Brings the drafter up to date if
        it is to draft."""
        if self.guide is None:
            return None
        planned = self.guide.begin(self.sequences)
        if planned:
            self.state = self.guide.absorb(self.state, self.cache.max_len)
        return planned

    def _deepest(self, levels: Tensor | None) -> int | None:
        """The largest of levels [B] over the rows that still decode; None if it is not known without waiting: on a
        GPU, while the last round runs."""
        if levels is None or (self.overlap and self.device.type != "cpu"):
            return None
        return max((levels * self.progress.active).tolist())

    def _asked(self) -> int:
        """The most levels that a row which still decodes lets count."""
        most = self.round.policy.steps
        return max((most if s.steps is None else min(s.steps, most) for s in self.going()), default=0)

    def _itself(self) -> Tensor:
        """What a plain round's positions see of themselves, where the host knows only a bound of a row's length."""
        return torch.ones(len(self.sequences), 1, 1, dtype=torch.bool, device=self.device)

    def _shed(self, ended: list[bool]) -> None:
        """Drop rows that have ended if they have been carried for long enough."""
        if not self.compact or not any(ended):
            return
        self.carried += sum(ended) / len(ended)
        if self.carried >= PRICE:
            self._drop(ended)

    def _drop(self, ended: list[bool]) -> None:
        if not any(ended):
            return
        kept = Survivors(ended, self.device)
        self.carried = 0.0
        self.sequences, index = kept.of(self.sequences), kept.index
        self.root = self.root[index]
        self.cache.compact(kept)
        if self.state is not None:
            self.state = self.state.compact(index)
            self.round.drafter.compact(kept)
        if self.guide is not None:
            self.guide.compact(kept)
        self.progress.compact(index)
        self.settings.noise.compact(index)
        penalties = self.settings.penalties
        if penalties is not None:
            penalties.compact(index)
        if self.sequences:
            settings = replace(
                self.settings, sampling=self._sampling(self.sequences), masks=Masks(self.sequences) or None
            )
            self.settings = replace(settings, steps=self._steps(self.sequences))
