"""A quantised target on the CPU: is speculation lossless on it, and what does it do to a head that knows the original?

    python scripts/quantised_check.py --prompt-file MT_BENCH --out docs/quantised.json

The demo target is quantised by torchao, int8, weights only, and saved as transformers saves it; it is then loaded as
any quantised checkpoint, through transformers' modules. Its speculative text is compared with its own plain text, token
for token, and the heads that were trained on the target in fp32 draft for both. Needs torchao, which nothing else here
does. Ends with 1 if a text differs for no numerical reason; the last line is one JSON object.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import checkout  # noqa: F401  (puts the repository on the path)
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, TorchAoConfig

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.engine.engine import Engine
from specdec.engine.traces import tau_interval
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts, read_encoded
from specdec.lab.output import write_json
from specdec.lab.proof.equality import EqualityProver
from specdec.lab.proof.rollback import prove_rollback
from specdec.trees import Chain

HEADS = ("demo/eagle3", "demo/mtp")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt-file", type=Path, required=True, help="as specdec generate takes it")
    p.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--steps", type=int, default=5, help="length of the chain (default 5)")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "limit", "max_new_tokens", "steps")
    return args


def quantise(folder: Path) -> None:
    """The demo target in int8, as transformers saves it."""
    from torchao.quantization import Int8WeightOnlyConfig

    how = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32, quantization_config=how)
    model.save_pretrained(folder)
    for file in Path(DEMO_TARGET).iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (folder / file.name).write_bytes(file.read_bytes())


def measure(name: str, target, prompts: list[list[int]], args: argparse.Namespace) -> list[dict]:
    """Of each head: is text lossless on this target, and tau of a chain with its 95 % interval over prompts."""
    prover, found = EqualityProver(target, prompts, args.max_new_tokens), []
    left = prove_rollback(target, prompts[:3]).bugs
    for head in HEADS:
        engine, rounds, mismatches = Engine(target, load_drafter(head, target), Chain(args.steps)), [], []
        for number, prompt in enumerate(prompts):
            row = engine.generate([prompt], max_new_tokens=args.max_new_tokens).rows[0]
            rounds.append([row.trace.rounds, sum(row.trace.emitted)])
            if row.tokens != prover.plain[number]:
                mismatches.append(prover.first_mismatch(number, row.tokens))
        ties, texts = sum(m.tie for m in mismatches), len(prompts)
        counts = {"texts": texts, "same": texts - len(mismatches), "ties": ties, "bugs": len(mismatches) - ties + left}
        played, emitted = torch.tensor(rounds).sum(0).tolist()
        interval = tau_interval(torch.tensor(rounds))
        found.append({"target": name, "head": head, **counts, "tau": emitted / played, "interval": interval})
    return found


@one_sentence_errors
def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        quantise(Path(folder))
        targets = {"fp32": load_target(DEMO_TARGET), "int8": load_target(folder)}
        prompts = read_encoded(targets["fp32"], args.prompt_file, args.limit)
        rows = [row for name, target in targets.items() for row in measure(name, target, prompts, args)]
    table = Table("target", "head", "texts equal", "ties", "bugs", "tau")
    for row in rows:
        tau = f"{row['tau']:.2f} ({row['interval'][0]:.2f}-{row['interval'][1]:.2f})"
        same = f"{row['same']} of {row['texts']}"
        table.add_row(row["target"], row["head"], same, str(row["ties"]), str(row["bugs"]), tau)
    console(120).print(table)
    what = {"prompts": args.limit, "max_new_tokens": args.max_new_tokens, "steps": args.steps}
    result = provenance(torch.device("cpu")) | what | {"torchao": importlib.metadata.version("torchao"), "rows": rows}
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result))
    if any(row["bugs"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
