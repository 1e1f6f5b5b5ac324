"""Random weights in the shape of a real model, and a tau for them that is given. Only their speed means anything.

conf/shape/*.yaml holds the public config of each model. All values are bf16 values whatever the dtype, as in the
checkpoints of these models: on the CPU the speed of fp32 depends on that (`specdec.ops.linear`).

Nothing that random weights draft is accepted. `SimulatedTau` lets such a pair decode as if a given number of tokens
were accepted. The times are real, and the text is void. Mark every number that comes from it as SIMULATED.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec.drafters import eagle3
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import read_config
from specdec.model.layers import RMSNorm
from specdec.model.target import Target
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict, Verifier
from specdec.verify import sample_and_match

STD = 0.02
MARK = "SIMULATED"


def random_target(config: dict, name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Target:
    """A target of a Hugging Face config, without a tokenizer and without end-of-text tokens."""
    with torch.device("meta"):
        target = Target(read_config(config, name)).to(dtype)
    target.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.normal_(std=STD, generator=generator).bfloat16())
            else:
                parameter.zero_()
        for module in target.modules():
            if isinstance(module, RMSNorm) and not module.offset:
                module.weight.fill_(1)
    if target.config.tied:
        target.head.weight = target.embed.weight
    target.eval().name = name
    return target


def random_head(target: Target, draft_vocab_size: int | None = None, seed: int = 0, **settings) -> nn.Module:
    """An EAGLE-3 head for a target, in its dtype and on its device; `settings` are those of `eagle3.create`."""
    torch.manual_seed(seed)
    vocab = target.vocab
    with torch.device(target.device):  # the CPU would take seconds to draw the weights of a large head
        ids = None if draft_vocab_size is None else torch.arange(min(draft_vocab_size, vocab))
        drafter = eagle3.create(target, vocab=DraftVocab(vocab, ids), init="random", **settings)
    drafter.bfloat16().to(target.device, target.dtype).eval().requires_grad_(False)
    return drafter


def random_transformers(config: dict, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Transformers' own model of the same config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
    return model.eval().requires_grad_(False)


@dataclass
class SimulatedTau:
    """Does all the work of `verifier`, and then lets every row emit a number of tokens that depends on the round alone.

    Round r of this object emits floor((r+1) tau) - floor(r tau) tokens, the bonus counted, so that k rounds emit k tau
    tokens, rounded down. The accepted nodes are the tree's first ones, even if they are not on one path: as many keys
    move as on a path of that length. Its text is not the target's, so `specdec.verify` does not list it.

    The count of rounds is on the device, so that nothing waits for it and a captured round continues counting.
    """

    tau: float
    verifier: Verifier = sample_and_match
    rounds: Tensor | None = field(default=None, init=False, repr=False)

    lossless = False

    def __post_init__(self) -> None:
        """Take over the flags of `verifier`. Raises ValueError for a tau below 1 or infinite."""
        if not 1 <= self.tau < float("inf"):
            raise ValueError(f"a simulated tau must be at least 1, the bonus token, got {self.tau}")
        self.needs_q, self.chains_only = self.verifier.needs_q, self.verifier.chains_only
        self.likeliest_only, self.couples = self.verifier.likeliest_only, self.verifier.couples

    def __str__(self) -> str:
        """Return the rule's name for titles and tables."""
        return f"{MARK} tau {self.tau:g}"

    def check(self, steps: int) -> None:
        """Raise ValueError unless rounds of a tree of `steps` levels can emit so many tokens."""
        if self.tau > steps + 1:
            raise ValueError(
                f"a simulated tau of {self.tau:g} needs trees of at least {self.tau - 1:g} levels, this one has {steps}"
            )

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Run `verifier`, then replace its path by the round's number of nodes. The bonus token stays."""
        true = self.verifier(tree, logits, sampling, noise)
        if self.rounds is None or self.rounds.device != logits.device:
            self.check(tree.steps)
            self.rounds = torch.zeros(1, dtype=torch.float64, device=logits.device)
        b, nodes = tree.tokens.shape
        before = (self.rounds * self.tau).floor()
        self.rounds += 1
        n = ((self.rounds * self.tau).floor() - before).long().clamp(max=tree.steps + 1).expand(b)
        path = torch.arange(tree.steps + 1, device=logits.device).clamp(max=nodes - 1)
        path = torch.where(path < n[:, None], path, 0)
        bonus = true.tokens.gather(1, true.n[:, None] - 1)
        tokens = tree.tokens.gather(1, path).roll(-1, 1).scatter(1, n[:, None] - 1, bonus)
        return Verdict(path=path, n=n, tokens=tokens)
