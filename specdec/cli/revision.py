"""The commit of the running code, for the records of results, even without git.

`scripts/gpu_wheels.py` notes commit and digest of the code in a file that travels with the checkout to such machines.
"""

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTE = ROOT / "build" / "wheels" / "REVISION"
ROOMS = ("specdec", "drafters", "trees", "training", "conf", "scripts", "tests")  # rglob follows no links


def revision() -> str | None:
    """The commit, followed by '+changes' if files differ from it; None if neither git nor the note has it."""
    # An installation may lie in a repository of something else, which does not track this file.
    commit = _git("ls-files", "--error-unmatch", "specdec/cli/revision.py") and _git("rev-parse", "HEAD")
    if commit:
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    try:
        commit, digest = NOTE.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return commit if digest == code_digest() else None  # unless the note is of other code than this


def code_digest(folders: Sequence[str] = ROOMS, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Return a digest of the Python and YAML files of these folders of the checkout that are `wanted` by name."""
    files = [f for folder in folders for kind in ("*.py", "*.yaml") for f in (ROOT / folder).rglob(kind)]
    named = {f.relative_to(ROOT).as_posix(): f for f in files}
    sums = [f"{n} {hashlib.sha256(named[n].read_bytes()).hexdigest()}" for n in sorted(named) if wanted(n)]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def _git(*words: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", *words]  # a lock would end the user's own `git commit` of this moment
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None
