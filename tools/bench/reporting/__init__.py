"""The parts of tools/bench/report."""

import os
import sys

# The benchmarks beside this package import each other by name.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
