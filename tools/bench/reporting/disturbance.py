"""What other programs take of the cores of a benchmark, round by round.

Two signs. The control is a thread that copies memory and never blocks: its time off the CPU went to
something else. And the kernel counts how long each core was busy: the part that no process of the
benchmark used went to something else. The kernel counts in ticks of 10 ms, so a short round is
judged by the control alone.
"""

import os
import time
from dataclasses import dataclass

from reporting import processes
from reporting.figures import Rounds

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# A shorter foreign time is within the error of the kernel's ticks.
LEAST_FOREIGN_S = 4 * TICK_S
COPY_BYTES, COPIES = 16 << 20, 6  # of the control in a round


@dataclass(frozen=True)
class Reading:
    at_s: float
    busy_s: float  # of the cores
    own_s: float  # of the processes of the benchmark


def busy_seconds(stat, cpus, tick_s=TICK_S):
    """How long `cpus` ran programs or were stolen, given the text of /proc/stat.

    Interrupts do not count: those of a backend's own packets are among them, and some kernels do
    not count them as time of the process.
    """
    wanted = {f"cpu{cpu}" for cpu in cpus}
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _wait, _irq, _softirq, steal = (int(x) for x in fields[:8])
            total += user + nice + system + steal
    return total * tick_s


def foreign_share(before, after, cpus):
    """The share of the cores' time that other processes took between two readings."""
    wall = after.at_s - before.at_s
    foreign = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    if wall <= 0 or foreign < LEAST_FOREIGN_S:
        return 0.0
    return foreign / (wall * cpus)


def off_cpu_share(answers):
    """The largest share of a rank's copying that it was not on a CPU; 0 without a control."""
    shares = [1 - x["cpu_ns"] / max(1, x["end_ns"] - x["start_ns"]) for x in answers]
    return max([0.0, *shares])


def seconds_of(answers, count):
    """The slowest rank's time of one call."""
    return max(answer["end_ns"] - answer["start_ns"] for answer in answers) / 1e9 / count


class Watch:
    """Reads the clocks of some processes and cores."""

    def __init__(self, pids, cpus):
        self.pids, self.cpus = pids, cpus
        self.begun = None

    def read(self):
        with open("/proc/stat", encoding="ascii") as stream:
            busy = busy_seconds(stream.read(), self.cpus)
        own = time.process_time() + sum(processes.cpu_seconds(pid) for pid in self.pids)
        return Reading(time.monotonic(), busy, own)

    def begin(self):
        self.begun = self.read()

    def end(self, control):
        """The disturbance since begin(), given the control's answers: the larger of both signs."""
        return max(foreign_share(self.begun, self.read(), len(self.cpus)), off_cpu_share(control))


class CollectiveWorkers(processes.Ranks):
    """Ranks of collective_worker, each pinned to a core."""

    def __init__(self, context, label, ranks, backends):
        super().__init__(label, context.folder)
        worker = context.program("collective-worker")
        place = os.path.join(context.folder, f"{label}-{ranks}")
        barrier = processes.barrier_file(f"{place}.barrier", ranks)
        for rank in range(ranks):
            command = [worker, f"--rank={rank}", f"--size={ranks}", f"--store={place}.store"]
            command += [f"--barrier={barrier}", f"--backends={','.join(backends)}"]
            command += [f"--cpu={context.cpu_of(rank)}"]
            self.start(f"{label}-{ranks}", command, processes.environment(rank, 0, ranks))
        self.hello = self.answers("the start")[0]


class Referee(CollectiveWorkers):
    """The control: a process per core that copies memory, all at the same time, in every round."""

    def __init__(self, context):
        super().__init__(context, "control", 2, [])
        self.cpus = context.cpus
        self.rounds = Rounds()

    def copy(self):
        """Returns (seconds of one copy, the answers)."""
        answers = self.ask(f"time memcpy copy {COPY_BYTES} private {COPIES}")
        return seconds_of(answers, COPIES), answers

    def measure(self, count, sides, once, control):
        """Adds `count` rounds. once(turn) returns subject -> seconds; `control` names the copy."""
        watch = Watch([pid for side in [self, *sides] for pid in side.pids()], self.cpus)
        for turn in range(count):
            watch.begin()
            copy_s, answers = self.copy()
            times = once(turn)
            self.rounds.add({**times, control: copy_s}, watch.end(answers))
        return self.rounds
