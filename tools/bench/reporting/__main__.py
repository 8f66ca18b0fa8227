"""Runs the report: tools/bench/report."""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
from reporting import main  # noqa: E402  (found by the line above)

sys.exit(main.main(sys.argv[1:]))
