"""Build the documentation site in build/site with Zensical. A warning or a broken link ends the build with code 1.

The pages are those of docs/, which GitHub shows too. They are copied to build/docs, next to the pages of the project
that they link to. Reference pages get the commands' help and the files of conf/ appended.
"""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from checkout import ROOT

from specdec.__main__ import COMMANDS, main

PAGES = ROOT / "build" / "docs"
OTHERS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "specdec/demo/README.md": "demo_card.md",
    "specdec/demo/DATA.md": "demo_data.md",
}
LINK = re.compile(r"\]\(([^)#:\s]+)(?=[)#])")


def commands() -> str:
    """Return the help text of every command, in Markdown."""
    parts = []
    for name in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*name.split(), "--help"])
        parts.append(f"\n## specdec {name}\n\n```\n{out.getvalue().strip()}\n```\n")
    return "".join(parts)


def configuration() -> str:
    """Return every file of conf/ by group, in Markdown."""
    parts = []
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))):
        parts.append(f"\n## {group.name}\n")
        for file in sorted(group.glob("*.yaml")):
            text = file.read_text(encoding="utf-8").rstrip()
            parts.append(f"\n### {group.name}={file.stem}\n\n```yaml\n{text}\n```\n")
    return "".join(parts)


APPENDED = {"reference_commands.md": commands, "reference_configuration.md": configuration}


def stage() -> None:
    """Write the pages to build/docs, their links changed to the names that pages have there."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    staged = {path.resolve(): path.name for path in (ROOT / "docs").iterdir()}
    staged |= {(ROOT / path).resolve(): name for path, name in OTHERS.items()}
    for path, name in staged.items():
        if path.suffix != ".md":
            shutil.copy(path, PAGES / name)
            continue
        text = path.read_text(encoding="utf-8")
        for link in set(LINK.findall(text)):
            there = (path.parent / link).resolve()
            if there not in staged:
                raise SystemExit(f"{path.relative_to(ROOT)} links to {link}, which is no page. Add it to OTHERS.")
            text = text.replace(f"]({link}", f"]({staged[there]}")
        hidden = "---\nsearch:\n  exclude: true\n---\n" if name == "log.md" else ""
        (PAGES / name).write_text(hidden + text + APPENDED.get(name, str)(), encoding="utf-8")


if __name__ == "__main__":
    if not (zensical := Path(sys.executable).parent / "zensical").exists():
        raise SystemExit(f"there is no {zensical}: run `make docs`, or pip install '.[docs]'")
    stage()
    command = [zensical, "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout)
    sys.exit(done.returncode or "griffe:" in done.stdout)  # strict mode overlooks warnings about docstrings
