"""The parts of tools/bench/report."""
