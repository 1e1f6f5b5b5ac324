"""What every script imports first, so that it runs from any folder, with this checkout installed or not.

Imports of a script, and of the Python processes that it starts, find the packages of its own checkout.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path[:1]:
    sys.path.insert(0, str(ROOT))
searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if searched[0] != str(ROOT):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, searched)])
