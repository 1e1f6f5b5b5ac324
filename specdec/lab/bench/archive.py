"""All results of a run in one file that is whole at any moment."""

import io
import tarfile
from pathlib import Path

from specdec.cli.files import write_whole

LOG_BYTES = 1 << 20  # of a log its end is kept


class Archive:
    """A .tar.gz of the JSON files and logs of a folder, made anew when they have changed."""

    def __init__(self, folder: Path, path: Path):
        self.folder, self.path = folder, path
        self.packed: list[tuple] = []

    def pack(self) -> None:
        """Put what the folder holds now into the archive, unless that is in it already."""
        files = sorted(f for kind in ("*.json", "*.jsonl", "*.log") for f in self.folder.glob(kind))
        state = [(f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files]
        if state != self.packed:
            write_whole(self.path, lambda aside: self._fill(aside, files))
            self.packed = state

    def _fill(self, aside: Path, files: list[Path]) -> None:
        with tarfile.open(aside, "w:gz") as archive:
            for file in files:
                content = file.read_bytes()
                if file.suffix == ".log":
                    content = content[-LOG_BYTES:]
                entry = archive.gettarinfo(file, arcname=f"results/{file.name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
