"""Standard streams that are closed, full, or read by nobody."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_a_reader_that_went_away_is_no_error():
    done = shell(f"({HELP}; echo $? >&2) | true")
    assert done.stderr in ("0\n", "")  # empty where the shell itself was ended by the pipe


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_is_empty_and_gets_into_no_file(closed, tmp_path):
    (tmp_path / "p.py").write_text(PROGRAM)
    stdin = "" if "<" in closed else "</dev/null"
    done = shell(f"{sys.executable} {tmp_path / 'p.py'} {tmp_path / 'out'} {closed} {stdin}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "no line"


def test_what_the_system_refuses_is_one_sentence(capsys):
    from specdec.cli.errors import one_sentence_errors

    @one_sentence_errors
    def main():
        Path("/proc/self/mem-that-is-not").read_text()

    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: cannot use /proc/self/mem-that-is-not: No such file or directory\n"


def test_a_table_that_nobody_reads_is_no_error_either():
    program = (
        "from rich.table import Table; from specdec.cli.errors import one_sentence_errors; "
        "from specdec.cli.terminal import console; t = Table(); [t.add_row('x' * 40) for _ in range(5000)]; "
        "one_sentence_errors(lambda: console(80).print(t))()"
    )
    done = shell(f'({sys.executable} -c "{program}"; echo $? >&2) | true')
    assert done.stderr in ("0\n", "")
