"""python -m posttrain."""

import sys

from posttrain.cli import main

sys.exit(main())
