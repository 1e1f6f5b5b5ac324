"""A plugin of pytest: products as a processor with AMX makes them, with its tiles in software, on one without."""

import hashlib
from pathlib import Path

from specdec.model import native

TILES = Path(__file__).with_name("tiles_in_software.h")
VERSION = hashlib.sha256(TILES.read_bytes()).hexdigest()  # flags name a kept library
native.FAST = (*native.FAST, "-mamx-tile", "-mamx-bf16", "-include", str(TILES), f"-DVERSION_OF_TILES={VERSION}")
