"""Makes the shared material importable: tests are not a package."""

import sys
from pathlib import Path

import posttrain  # noqa: F401  before torch: it sets how idle threads wait, on which runs with two of them depend

sys.path.insert(0, str(Path(__file__).parent))
