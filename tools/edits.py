"""Write docs/edits.md from the patches in tests/edits/.

python tools/edits.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import patches  # noqa: E402

if __name__ == "__main__":
    patches.PAGE.write_text(patches.page(patches.read_all()), encoding="utf-8")
