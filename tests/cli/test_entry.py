"""One entry: `specdec` lists its commands without loading them, and every one of them explains itself."""

import ast
import inspect
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import main_of, run_here

import specdec
from specdec import __main__ as entry
from specdec import api, registry
from specdec.children import KINDS
from specdec.cli.commands import COMMANDS, GROUPS, OLD, loading, parse, parser_of
from specdec.cli.flags import FLAGS, MODELS, RULE, SAMPLING, TREE, Flag
from specdec.drafters.formats.convert import SERVERS
from specdec.machine import PRECISIONS
from specdec.model.checkpoint import DRAFT_DTYPES
from specdec.sampling_settings import SamplingWords
from specdec.trees.spec import TreeSettings
from specdec.tuning.engines import NAMES
from specdec.tuning.grid import NODES, WIDTHS
from specdec.verify import VERIFIERS, VerifierSettings

ROOT = Path(__file__).parents[2]


def shown(*words: str) -> str:
    """What the command prints, wherever it ends."""
    return run_here(entry.main, *words).stdout


def test_the_overview_fits_a_screen_and_names_ten_commands():
    lines = shown("--help").splitlines()
    assert lines == shown().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    first = [line.split()[0] for line in lines if line.startswith("  ")]
    assert first == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert len(set(first) - {"lab"}) == 10
    for group in GROUPS:
        inner = shown(group)
        assert inner == shown(group, "--help")
        assert all(f"  {name} " in inner for name in COMMANDS if name.startswith(f"{group} "))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = shown(*name.split(), "--help").splitlines()
    assert lines[0].startswith(f"usage: specdec {name} ")
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 120
    assert "python -m" not in lines[0]


# Each refused at once; the message holds the second text.
REFUSED = (
    ("generate", "give exactly one of --prompt, --prompts and --chat"),
    ("generate --model x", "there is no flag --model; there is --target"),
    ("generate --speculative-num-steps 3", "there is --steps"),
    ("generate --tempersture 1", "there is --temperature"),
    ("generate --prompt x --topk 0", "--topk must be at least 1"),
    ("generate --prompt x --tree 1/2/3 --topk 2", "--topk contradicts --tree"),
    ("generate --prompt x --no-draft --draft ngram", "--draft contradicts --no-draft"),
    ("generate --prompt x --top-p 2", "top_p must be at most 1"),
    ("generate --prompt x --verifier none", "there is no verifier 'none'"),
    ("generate --prompts nowhere.txt", "no such prompt file: nowhere.txt"),
    ("generate --prompt x --target nowhere --draft ngram", "no such checkpoint folder: nowhere"),
    ("generate --prompt x --target demo/target --draft demo/none", "nothing bundled is called demo/none"),
    ("serve --port 70000", "--port must be at most 65535"),
    ("serve --tree auto", "--tree auto chooses for one load"),
    ("train --model x", "there is no flag --model; there is --target"),
    ("train --taget x", "there is no flag --taget; there is --target"),
    ("train --dataset=x", "there is no flag --dataset; there is --data"),
    ("train model=x", "there is no setting model; there is target"),
    ("train --draft demo/eagle3", "there is no flag --draft; there is --from"),
    ("train --sed 3", "there is no flag --sed; there is --seed"),
    ("train trainer.stps=3", "There is trainer.steps"),
    ("train out=", "out is empty"),
    ("train cache --keeps all", "there is --keep"),
    ("data", None),
    ("data shw", "specdec data has regenerate, show, count"),
    ("data show", "the following arguments are required: --data"),
    ("data count --size 9 --out m.json", "give at least one of --data and --text"),
    ("data count --data d --size 9 --out m.txt", "--out must end in .json or .pt"),
    ("data regenerate --prompts d --out a.jsonl --part 3/2", "--part is K/N"),
    ("checkpoint inspect", "required: --draft"),
    ("checkpoint export demo/mtp out --for moon", "invalid choice: 'moon'"),
    ("compare topkk=3", "There is topk"),
    ("sweep --benchmrk x", "there is no flag --benchmrk"),
    ("tune --out s.yaml", "required: --prompts"),
    ("tune tree --prompts pyproject.toml", "give at least one of --keep and --out"),
    ("prove --server http://x --self-test", "--self-test contradicts --server"),
    ("prove --server http://x --draws 9", "--draws contradicts --server: the server's texts are greedy"),
    ("prove --server http://x --plain-server http://y --dtype bf16", "--dtype contradicts --plain-server"),
    ("data regenerate --prompts x --out y.jsonl --server http://x --batch-size 8", "--batch-size contradicts --server"),
    ("data regenerate --prompts x --out y.jsonl --requests 8", "--requests needs --server: give both"),
    ("tune tree --prompts x --keep --num-draft-tokens 8", "--num-draft-tokens needs --out: give both"),
    ("generate --prompt x --no-draft --recalibrate", "--recalibrate contradicts --no-draft"),
    ("generate --prompt x --topk 1 --recalibrate", "--recalibrate is for --tree auto and --adaptive"),
    ("trace metrics", "required: TRACE"),
    ("lab bench serve --prompts x --rate 1 --concurrency 1", "--concurrency contradicts --rate"),
    ("lab jobs parts=2", "write the command after --"),
    ("generat", "did you mean generate? specdec --help lists all"),
    ("chat", "did you mean generate --chat? "),
    ("zzz", "there is no command 'zzz'; specdec --help lists all"),
)


def test_help_and_refusals_do_not_load_torch():
    """In one process, as most of the time of each is Python's own start."""
    lines = [*(f"{name} --help" for name in COMMANDS), *(line for line, _ in REFUSED), "--version"]
    program = f"""
import contextlib, io, sys
from specdec.__main__ import main
for line in {lines!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main(line.split())
    print(repr(out.getvalue()))
    assert "torch" not in sys.modules, line
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = map(ast.literal_eval, done.stdout.splitlines()[len(COMMANDS) :])
    for (line, message), text in zip(REFUSED, said, strict=False):
        assert message is None or message in text, (line, text)
        assert message is None or (text.startswith("error: ") and text.count("\n") == 1), text


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_old_names_say_the_new_ones(old, new):
    done = run_here(entry.main, *old.split(), *(["inspect"] if new == "checkpoint" else []), "--help")
    assert done.stdout.startswith(f"usage: specdec {new}")
    assert done.stderr == f"note: specdec {old} is now specdec {new}\n"


def test_old_flags_say_the_new_ones(capsys, tmp_path):
    (tmp_path / "p.txt").write_text("x\n")
    args = parse("generate", ["--prompt-file", str(tmp_path / "p.txt"), "--limit=1"])
    assert (args.prompts, args.limit) == (tmp_path / "p.txt", 1)
    assert capsys.readouterr().err == "note: specdec generate --prompt-file is now --prompts\n"
    assert parse("data show", ["--data", "x", "--count=3"]).limit == 3
    assert "--count is now --limit" in capsys.readouterr().err


def test_the_first_line_names_what_is_loaded(capsys, monkeypatch):
    loading("generate", None, None)
    loading("prove", "T", ["A", "ngram"])
    monkeypatch.setattr("specdec.cli.hydra_entry.loading", loading)
    with pytest.raises(SystemExit):
        main_of("lab bench")(["shape=tiny", "simulate_tau=9"])
    said = capsys.readouterr().err.splitlines()[:3]
    assert said == [
        "specdec generate: loading demo/target",
        "specdec prove: loading T and A and ngram",
        "specdec lab bench: loading tiny",
    ]


def test_values_stand_without_their_flag_where_there_is_one_meaning(tmp_path):
    out = str(tmp_path)
    for words in (
        ["demo/mtp", out],
        ["demo/mtp", "--out", out],
        ["--draft=demo/mtp", out],
        [f"--out={out}", "demo/mtp"],
    ):
        args = parse("checkpoint convert", ["--to", "x", *words])
        assert (args.draft, args.out, args.to) == ("demo/mtp", tmp_path, "x")


@pytest.mark.parametrize(
    ("part", "table"),
    [(api.ModelSettings, MODELS), (api.Sampling, SAMPLING), (TreeSettings, TREE), (VerifierSettings, RULE)],
)
def test_the_table_of_flags_has_the_fields_of_the_settings(part, table):
    flags = {name: False if flag.kind is bool else flag.default for name, flag in table.items()}
    assert flags == {f.name: f.default for f in fields(part)}


def test_arguments_of_generate_are_the_fields_of_sampling():
    known = inspect.signature(api.generate).parameters
    assert list(SamplingWords.__annotations__) == [f.name for f in fields(api.Sampling)]
    assert set(SamplingWords.__annotations__) <= set(known)
    assert not any(one.kind is one.VAR_KEYWORD for one in known.values())  # so completion shows every option


def test_the_table_of_flags_has_the_choices_of_the_code():
    assert set(TREE["children"].choices) == set(KINDS)
    assert set(MODELS["draft_dtype"].choices) == set(DRAFT_DTYPES)
    assert set(MODELS["matmul_precision"].choices) == set(PRECISIONS)
    assert set(FLAGS["for"].choices) == set(SERVERS)
    assert all(name in FLAGS["adaptive"].help for name in NAMES[1:])
    assert all(name in RULE["verifier"].help for name in VERIFIERS)
    assert COMMANDS["tune"].own["topk"].default == list(WIDTHS)
    assert COMMANDS["tune"].own["num_draft_tokens"].default == list(NODES)


def test_a_flag_of_one_command_stands_in_the_table_of_commands(monkeypatch):
    command = COMMANDS["generate"]
    flags = command.flags | {"output": f"{command.flags['output']} fresh"}
    changed = command._replace(flags=flags, own={**command.own, "fresh": Flag("new", bool)})
    monkeypatch.setitem(COMMANDS, "generate", changed)
    assert "--fresh new" in " ".join(parser_of("generate").format_help().split())
    assert parse("generate", ["--prompt", "x", "--fresh"]).fresh


def test_the_version():
    assert shown("--version") == f"{specdec.__version__}\n"
    named = {line.split(":")[0] for line in shown("--version", "--verbose").splitlines()}
    assert named >= {"specdec", "torch", "transformers", "system", "device", "cpu"}


def test_everything_is_installed():
    """pip takes folders with an __init__.py, and of other files what package-data names."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {f.resolve() for pattern in data["specdec"] for f in (ROOT / "specdec").glob(pattern)}
    named |= {f for f in (ROOT / "conf").rglob("*.yaml") if "conf/**/*.yaml" in data["specdec"]}
    for package in ("specdec", "drafters", "trees", "training", "conf"):
        files = [f for f in (ROOT / package).rglob("*") if f.is_file() and f.suffix != ".pyc"]
        for file in files:
            assert file in named or (file.suffix == ".py" and (file.parent / "__init__.py").is_file()), file


def test_the_interface_is_named_in_both_places():
    assert set(api.__all__) == {name for name, module in specdec.INTERFACE.items() if module == "specdec.api"}
    assert specdec.parse_tree is api.parse_tree


def test_the_target_node_of_hydra_has_the_fields_of_the_flags():
    node, of_flags = registry.settings("target", "demo"), {f.name: f.default for f in fields(api.ModelSettings)}
    assert node.pop("path") == of_flags["target"]
    assert node == {name: of_flags[name] for name in ("dtype", "matmul_precision", "device_map")}
