"""Install what a bare machine with a GPU lacks, into a folder that travels with the checkout.

    python scripts/gpu_wheels.py --python 3.12

Needs the network and pip. Hydra, OmegaConf, the ANTLR runtime, platformdirs and pydantic, in the versions of
constraints.txt, are installed in build/wheels, which git ignores: put that folder and the checkout on PYTHONPATH
(docs/gpu.md). pydantic's core is compiled for the Python that --python names, on Linux and this kind of processor.
Torch, Triton, transformers, accelerate, matplotlib, rich, pytest and pytest-xdist must be there already.

Every call writes the commit and a digest of the code to build/wheels/REVISION. Where there is no git, results name the
commit by that, as long as the code is the same: call this again after the last change. --out writes the packages to
another folder, without the note.
"""

import argparse
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import checkout

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.cli.revision import NOTE, code_digest, revision

# Dependencies that are on a machine with torch, transformers, accelerate and matplotlib; no stage needs gguf.
THERE = {
    *("torch", "triton", "transformers", "accelerate", "tokenizers", "safetensors", "huggingface-hub", "filelock"),
    *("numpy", "pyyaml", "tqdm", "jinja2", "markupsafe", "typing-extensions", "rich", "matplotlib", "fonttools"),
    "gguf",
}
ANTLR = "antlr4-python3-runtime==4.9.3"  # both packages ask for 4.9; it comes as source, and pip builds it
GLIBC = ("manylinux_2_17", "manylinux2014")  # the oldest that wheels are built for


def wanted() -> list[str]:
    """The packages with their versions. Raises ValueError if constraints.txt does not name one."""
    project = tomllib.loads((checkout.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [re.split("[<>=]", given)[0] for given in project["dependencies"]]
    lines = (checkout.ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pinned = {line.split("==")[0]: line.split("#")[0].strip() for line in lines if "==" in line}
    if absent := set(packages) - set(pinned):
        raise ValueError(f"constraints.txt names no version of {min(absent)}")
    return [*(pinned[name] for name in packages if name not in THERE), ANTLR]


def install(packages: list[str], folder: Path, python: str) -> None:
    """Lay packages, and what pydantic needs, out in a folder for this version of Python."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    pip += ["--upgrade", "--target", str(folder)]
    other = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    other += [f"--platform={libc}_{platform.machine()}" for libc in GLIBC]
    for package in packages:
        how = other if package.startswith("pydantic") else ["--no-deps"]
        done = subprocess.run([*pip, *how, package], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"pip failed: {(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}")


@one_sentence_errors
def main() -> None:
    """Install the packages and write the note. Raises ValueError if git does not know the commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the packages; default: build/wheels, with the note")
    this = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--python", default=this, help="version on the machine with the GPU; default: %(default)s")
    args = parser.parse_args()
    folder = output_folder(args.out or NOTE.parent)
    install(wanted(), folder, args.python)
    if args.out is None:
        commit = revision()
        if commit is None:
            raise ValueError("git does not tell the commit of this checkout, so results could not name it")
        write_text(NOTE, f"{commit} {code_digest()}\n")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {', '.join(wanted())}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
