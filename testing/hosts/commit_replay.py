"""What a job has trained in the end, from the commit logs of its ranks.

The logs are those of testing/jobs/logging_trainer.cc.

A generation goes on from a checkpoint: what earlier ones have done beyond it is void. So the steps
that count are those of the newest generation that did them.
"""

import os
import re

_NAME = re.compile(r"generation-(\d+)-rank-(\d+)-of-(\d+)\.txt")


class ReplayError(Exception):
    """The logs do not belong to a job that trained every step once; the text says why."""


def read_logs(folder):
    """generation -> step -> rank -> (epoch, indices); and generation -> world size."""
    generations, worlds = {}, {}
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if not match:
            continue
        generation, rank, world = (int(x) for x in match.groups())
        if worlds.setdefault(generation, world) != world:
            raise ReplayError(f"generation {generation} has two world sizes")
        with open(os.path.join(folder, name), encoding="ascii") as stream:
            lines = stream.read().split("\n")[:-1]  # a line without its end: killed while writing
        for line in lines:
            step, epoch, *indices = (int(x) for x in line.split())
            ranks = generations.setdefault(generation, {}).setdefault(step, {})
            ranks[rank] = (epoch, indices)
    return generations, worlds


def replay(folder):
    """epoch -> the indices that were trained in it, in order; and the number of void steps."""
    generations, worlds = read_logs(folder)
    history, void = {}, 0
    for generation, steps in sorted(generations.items()):
        kept = {s: entry for s, entry in history.items() if s < min(steps)}
        void += len(history) - len(kept)
        history = kept
        for step, ranks in steps.items():
            history[step] = (generation, ranks)
    if sorted(history) != list(range(1, len(history) + 1)):
        raise ReplayError("the steps that count are not numbered from 1 without a gap")
    epochs = {}
    for step, (generation, ranks) in sorted(history.items()):
        if len(ranks) != worlds[generation]:
            raise ReplayError(
                f"step {step} counts, and was done by ranks {sorted(ranks)} of the "
                f"{worlds[generation]} of generation {generation}"
            )
        for epoch, indices in ranks.values():
            epochs.setdefault(epoch, []).extend(indices)
    return epochs, void


def check_once(epochs, count, samples):
    """Why not every sample was trained once in each of `count` epochs; "" when it was."""
    if sorted(epochs) != list(range(count)):
        return f"the epochs are {sorted(epochs)}, not 0 to {count - 1}"
    for epoch, indices in epochs.items():
        if sorted(indices) != list(range(samples)):
            missing = len(set(range(samples)) - set(indices))
            twice = len(indices) - len(set(indices))
            return f"epoch {epoch}: {missing} samples are missing, {twice} came again"
    return ""
