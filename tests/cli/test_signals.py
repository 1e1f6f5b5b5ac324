"""Signals: decoded tokens are printed and written, and the exit code is that of the signal. Standard streams
that are closed, full, or read by nobody, and tables that fit their terminal."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import main_of, run_here
from rich.table import Table

from specdec.cli import generate, session, summary, terminal
from specdec.cli.errors import StopSignals, one_sentence_errors
from specdec.cli.parser import help_width
from specdec.cli.terminal import console, print_table
from specdec.engine.trace_files import read_trace


def in_round(monkeypatch, which: int, act) -> None:
    """Act when the screen gets its round number `which`."""
    real_call, count = session.Screen.__call__, itertools.count(1)

    def call(self, report):
        if next(count) == which:
            act()
        real_call(self, report)

    monkeypatch.setattr(session.Screen, "__call__", call)


@pytest.fixture
def decode(target_path, drafter_path, tmp_path):
    """Call the command with the tiny pair, and write the trace to the folder t."""
    pair = ["--target", str(target_path), "--draft", str(drafter_path), "--trace", str(tmp_path / "t")]
    return lambda *words: run_here(main_of("generate"), *pair, *words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_generate_keeps_what_was_done(number, code, decode, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("The quick\nWhat is\nEin Café\n")
    before = signal.getsignal(number)
    words = "--prompts", str(tmp_path / "p.txt"), "--steps", "2", "--compare", "--json", "--max-new-tokens", "12"
    whole = json.loads(decode(*words).stdout.splitlines()[-1])
    in_round(monkeypatch, len(read_trace(tmp_path / "t").rows[0].rounds) + 3, lambda: os.kill(os.getpid(), number))
    done = decode(*words)
    assert done.returncode == code
    assert signal.getsignal(number) is before
    assert "stopped: 2 of 3 prompts were begun" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    first, cut = summary["token_ids"]
    assert first == whole["token_ids"][0]
    assert 0 < len(cut) < 12
    assert cut == whole["token_ids"][1][: len(cut)]
    assert summary["finish"] == [whole["finish"][0], "abort"]
    assert summary["identical_rows"] == summary["compared_rows"] == 1
    rows = read_trace(tmp_path / "t").rows
    assert [row.tokens for row in rows] == summary["token_ids"]
    assert rows[1].finish == "abort"


def test_a_reader_that_goes_away_loses_no_trace(decode, tmp_path, monkeypatch):
    in_round(monkeypatch, 4, Mock(side_effect=BrokenPipeError))
    assert decode("--prompt", "The quick", "--steps", "2", "--max-new-tokens", "32").returncode == 0
    (row,) = read_trace(tmp_path / "t").rows
    assert len(row.rounds) == 2
    assert row.finish is None


RANGE = "of 0 (the embedding) to 8 (after the final norm)"


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        ("hidden_states[2], hidden_states[5], hidden_states[8]", "reads hidden states 2, 5 and 8 " + RANGE),
        ("hidden_states[0, 3]", "reads hidden states 0 and 3 " + RANGE),
        ("hidden_states[3]", "reads hidden state 3 " + RANGE),
        ("hidden_states[N], the last one, after the final norm", "reads the last hidden state, after the final norm"),
        ("not listed: the default hidden_states[2], [N//2], [N-3] of 3 streams", ""),
    ],
)
def test_how_a_drafter_reads_is_said_in_words(taps, said):
    assert summary._drafter({"family": "F", "taps": taps}, 8) == "; ".join(filter(None, ["drafter: F", said]))


def test_in_a_chat_ctrl_c_stops_an_answer_and_at_the_prompt_ends(decode, tmp_path, monkeypatch):
    typed = ["The quick", "", "brown fox", "/rest", "/reset", "What is"]
    seen, encode = [], generate.encode_chat
    monkeypatch.setattr(generate, "encode_chat", lambda of, turns: seen.append(list(turns)) or encode(of, turns))
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*typed, KeyboardInterrupt]))
    in_round(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    done = decode("--chat", "--max-new-tokens", "12")
    assert done.returncode == 130
    assert done.stdout.startswith("chat with ")
    assert "there is no /rest: /reset begins a new conversation" in done.stdout
    first, second, third = ([(m["role"], m["content"]) for m in messages] for messages in seen)
    assert (first, third) == ([("user", "The quick")], [("user", "What is")])
    assert [second[0], second[2]] == [*first, ("user", "brown fox")]  # and the answer between them
    assert [row.finish for row in read_trace(tmp_path / "t").rows] == ["abort", "length", "length"]


def test_any_command_cleans_up_after_sigterm(tmp_path):
    @one_sentence_errors
    def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            (tmp_path / "cleaned").touch()

    done = run_here(main)
    assert (done.returncode, done.stderr) == (143, "terminated\n")
    assert (tmp_path / "cleaned").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGINT, (130, "interrupted\n")), (signal.SIGTERM, (143, "terminated\n"))]
)
def test_a_signal_in_a_callback_is_not_lost(number, ended, request):
    """Python drops what a weak reference's callback raises, such as those that end each import."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    @one_sentence_errors
    def main():
        weakref.finalize(value := io.StringIO(), os.kill, os.getpid(), number)
        del value
        time.sleep(10)

    hook = sys.unraisablehook
    done = run_here(main)
    assert (done.returncode, done.stderr) == ended
    assert sys.unraisablehook is hook


def test_an_error_of_what_sigterm_interrupted_is_not_reported():
    def main(at_once, later):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            if at_once:
                raise at_once from None
        raise later

    for at_once, later, code, message in (
        (RecursionError(), None, 143, "terminated\n"),  # as of numpy's imports
        (None, ValueError("no module"), 143, "terminated\n"),  # as of torch's, which swallow the signal
        (ValueError("not saved"), None, 2, "error: not saved\n"),
    ):
        done = run_here(partial(one_sentence_errors(main), at_once, later))
        assert (done.returncode, done.stderr) == (code, message)


def test_a_signal_that_another_process_got_is_no_success():
    assert StopSignals().code == 143


# Standard streams

HELP = f"{sys.executable} -m specdec --help"
# A command that reads a line, prints a lot and writes a file.
PROGRAM = """
import sys
from specdec.cli.errors import one_sentence_errors

@one_sentence_errors
def main():
    with open(sys.argv[1], "w") as file:
        print("shown " * 10_000)
        try:
            input()
        except EOFError:
            file.write("no line")
main()
"""


def shell(line: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_one_sentence():
    done = shell(f"{HELP} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "error: cannot write to standard output: No space left on device\n")
    for full in ("2> /dev/full", "> /dev/full 2>&1"):
        assert shell(f"{sys.executable} -m specdec none {full}").returncode == 2


def test_characters_that_an_encoding_lacks_are_escaped():
    program = "from specdec.cli.errors import one_sentence_errors as e; e(lambda: print(chr(177)))()"
    done = shell(f"PYTHONIOENCODING=ascii {sys.executable} -c '{program}'")
    assert (done.returncode, done.stdout) == (0, "\\xb1\n")


def test_a_current_folder_that_was_removed_is_one_sentence(tmp_path):
    done = shell(f"export PYTHONPATH=$PWD; mkdir {tmp_path}/a; cd {tmp_path}/a; rmdir ../a; {HELP}")
    assert (done.returncode, done.stderr) == (2, "error: the current folder has been removed: change to another one\n")


TABLE = (
    "from rich.table import Table; from specdec.cli.errors import one_sentence_errors; "
    "from specdec.cli.terminal import console; t = Table(); [t.add_row('x' * 40) for _ in range(5000)]; "
    "one_sentence_errors(lambda: console(80).print(t))()"
)


@pytest.mark.parametrize("command", [HELP, f'{sys.executable} -c "{TABLE}"'], ids=["help", "table"])
def test_a_reader_that_went_away_is_no_error(command):
    done = shell(f"({command}; echo $? >&2) | true")
    assert done.stderr in ("0\n", "")  # empty where the shell itself was ended by the pipe


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_is_empty_and_gets_into_no_file(closed, tmp_path):
    (tmp_path / "p.py").write_text(PROGRAM)
    stdin = "" if "<" in closed else "</dev/null"
    done = shell(f"{sys.executable} {tmp_path / 'p.py'} {tmp_path / 'out'} {closed} {stdin}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "no line"


def test_what_the_system_refuses_is_one_sentence():
    done = run_here(one_sentence_errors(Path("/proc/none").read_text))
    assert (done.returncode, done.stderr) == (2, "error: cannot use /proc/none: No such file or directory\n")


# Terminals


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_is_no_wider_than_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"heading{i} and words" for i in range(6)]
    table, out = Table(*names), io.StringIO()
    table.add_row(*["12345.678"] * 6)
    print_table(console(160, file=out), table, names[3:])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = out.getvalue().count("12345.678")
    assert shown == {40: 3, 60: 4, 80: 6, 200: 6}[width], "numbers stay whole"
    assert ("left out" in out.getvalue()) == (shown < 6)
    crowded = Table(*names)
    crowded.add_row(*["12345.678"] * 6)
    print_table(console(file=out), crowded)
    assert "…" not in out.getvalue(), "numbers without room are folded, and not cut"


def test_the_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", Mock(side_effect=OSError))
    assert terminal.terminal_width() is None
    assert console(123).width == 123
    monkeypatch.setenv("COLUMNS", "0")
    assert console().width == 80
    monkeypatch.setenv("COLUMNS", "1")
    assert help_width() == 40
    monkeypatch.delenv("COLUMNS")
    # `| tee` leaves the other streams at the terminal
    monkeypatch.setattr(os, "get_terminal_size", Mock(return_value=os.terminal_size((71, 24))))
    assert terminal.terminal_width() == 71
