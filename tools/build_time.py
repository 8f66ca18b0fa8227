"""What compiling has cost, from the profile of a Bazel run: the one figure by which it is watched.

Only compilers that ran are counted: neither what Bazel had already nor what came from a cache.
"""

import collections
import gzip
import json
import zlib

_COMPILATIONS = ("CppCompile", "CppPrecompile")
_PREFIXES = ("Compiling ", "Precompiling ")
LONGEST = 3


def read_profile(path):
    """The trace events of `bazel --profile=path.gz`; none when there is no whole profile."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return json.load(stream)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, zlib.error):
        return []


def compilations(events):
    """[(seconds, source file)] of the compilers that ran, the longest first."""
    actions = collections.defaultdict(list)  # thread -> its actions
    for event in events:
        if event.get("cat") == "action processing":
            actions[event["tid"]].append(event)
    found = []
    for event in events:
        if event.get("cat") == "local action execution" and event["name"] in _COMPILATIONS:
            found.append((event["dur"] / 1e6, _source(event, actions[event["tid"]])))
    return sorted(found, reverse=True)


def _source(run, actions):
    for action in actions:
        if action["ts"] <= run["ts"] < action["ts"] + action["dur"]:
            for prefix in _PREFIXES:
                if action["name"].startswith(prefix):
                    return action["name"][len(prefix) :]
    return "?"


def summary(found):
    """One line about what compilations() returned."""
    if not found:
        return "compile time: nothing was compiled"
    longest = ", ".join(f"{source} {seconds:.0f} s" for seconds, source in found[:LONGEST])
    total = sum(seconds for seconds, _ in found)
    return f"compile time: {total:.0f} s in {len(found)} files; longest: {longest}"
