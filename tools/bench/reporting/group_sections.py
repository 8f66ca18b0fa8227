"""A process group: the death of a rank, and sums over two hosts.

The hosts are network namespaces (testing/hosts/hosts.py), and tc limits what each sends. The
backends take turns, sum by sum. The time of a sum is that of its slowest rank, and its bytes are
the kernel's counts of the first host's interface: payload, acknowledgements, and a header for each
of the kernel's large packets.
"""

import contextlib
import os
import random
import shutil
import signal
import statistics
import time
from dataclasses import asdict, dataclass, field

from reporting import figures, processes
from reporting.disturbance import Watch
from reporting.job_sections import hosts
from reporting.processes import BenchmarkError, NotRun

ELEMENTS = 25 << 18  # 25 MiB, the default size of a bucket
SPREAD = ["min", "p50", "p90", "max"]


def spread(values):
    """The cells of SPREAD."""
    return [figures.number(figures.percentile(values, share)) for share in (0, 0.5, 0.9, 1)]


# ---- Death of a rank on one host --------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    kills: int
    ballast_mib: int = 0  # that the victim fills
    pinned: bool = True  # each rank to a core
    decides: bool = True  # the gate


CORES = 2
CASES = [
    Case("2 ranks, a core each", 2, 20),
    Case("2 ranks, a core each, victim with 1 GiB", 2, 6, ballast_mib=1024),
    Case("2 ranks on 2 cores, not pinned", 2, 10, pinned=False, decides=False),
    Case("4 ranks on 2 cores", 4, 10, decides=False),
]
PEER_DEATH_MS = 1
# The moment of a kill, in the time in which the cores are watched for other programs.
DELAYS_S = (0.25, 0.4)


@dataclass
class Deaths:
    """The ms to the errors of all survivors, one after the other, of all kills of a case."""

    quiet: list = field(default_factory=list)
    disturbed: list = field(default_factory=list)


@contextlib.contextmanager
def running_on(cpus):
    """Keeps this process on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class SummingRanks(processes.Ranks):
    """The ranks of one host, which sum until one of them is killed."""

    def __init__(self, context, case, victim):
        super().__init__("peer death", context.folder)
        self.context, self.case, self.victim = context, case, victim

    def begin(self):
        """Starts the ranks. Returns when each of them has done a sum, and does the next ones."""
        self._start(0, 0)
        port = self.answers("its port")[0]["port"]
        for rank in range(1, self.case.ranks):
            self._start(rank, port)
        self.answers("a sum")

    def _cpus(self, rank):
        cpus = self.context.cpus[:CORES]
        return [cpus[rank % CORES]] if self.case.pinned else cpus

    def _start(self, rank, port):
        cpus = ",".join(str(cpu) for cpu in self._cpus(rank))
        command = ["taskset", "--cpu-list", cpus, self.context.program("hierarchical-worker")]
        command += ["--until_failure", "--backends=shm", f"--elements={ELEMENTS}"]
        if rank == self.victim:
            command.append(f"--ballast_mib={self.case.ballast_mib}")
        self.start("peer-death", command, processes.environment(rank, port, self.case.ranks))

    def kill(self):
        """Kills the victim. Returns (ms to the error, the rank that it names) of each survivor."""
        survivors = [rank for rank in range(self.case.ranks) if rank != self.victim]
        # On the survivor's core this process would delay the error.
        with running_on(self._cpus(self.victim)):
            killed_ns = time.monotonic_ns()
            os.kill(self.processes[self.victim].pid, signal.SIGKILL)
            answers = self.answers("the error", survivors)
        return [((x["failed_ns"] - killed_ns) / 1e6, x["rank"]) for x in answers]


def measure_death(context, case, victim, delay_s):
    """Kills one rank of a new group after `delay_s`.

    Returns (what SummingRanks.kill() does, the share of the cores that other programs had before).
    """
    with SummingRanks(context, case, victim) as ranks:
        ranks.begin()
        watch = Watch(ranks.pids(), context.cpus[:CORES])
        watch.begin()
        time.sleep(delay_s)  # anywhere in a sum
        share = watch.end([])
        return ranks.kill(), share


def measure_deaths(context, case):
    """Returns Deaths. Raises when an error names another rank than the killed one."""
    chosen = random.Random(0)
    deaths, wrong = Deaths(), 0
    for number in range(context.rounds(case.kills, 1)):
        victim = number % (case.ranks - 1) + 1  # rank 0 serves the store
        errors, share = measure_death(context, case, victim, chosen.uniform(*DELAYS_S))
        times = deaths.disturbed if share > figures.DISTURBED_SHARE else deaths.quiet
        times += [ms for ms, _ in errors]
        wrong += sum(named != victim for _, named in errors)
    every = deaths.quiet + deaths.disturbed
    if wrong:
        raise BenchmarkError(
            f"{case.name}: {wrong} of {len(every)} errors name another rank than the killed one"
        )
    return deaths


def peer_death_gate(deaths):
    """`deaths`: name of a case -> Deaths, or {}. The cases that decide have one error per kill."""
    name = "peer death inside a host, time to PeerFailedError"
    quiet = [deaths[case.name].quiet for case in CASES if case.decides and case.name in deaths]
    largest = max((figures.percentile(times, 0.9) for times in quiet if times), default=None)
    gate = figures.gate_under(name, PEER_DEATH_MS, largest, "ms")
    if largest is not None:
        gate.figure = f"p90 {gate.figure}"
    elif quiet:
        gate.figure, gate.why = figures.DISTURBED_ONLY, "no quiet kill"
    fewest = min((len(times) for times in quiet), default=0)
    if fewest < figures.FEWEST_QUIET_ROUNDS:
        gate.undecided(f"{fewest} quiet kills of a case are too few")
    return gate


def run_peer_death(context, section):
    """The time from a rank's kill to PeerFailedError on the other ranks of its host."""
    section.gates = [peer_death_gate({})]
    context.program("hierarchical-worker")
    context.require_cores(CORES)
    columns = ["ms from the kill to the error", "errors", *SPREAD, "errors that name another rank"]
    note = "The gate is decided by the larger p90 of quiet kills in the cases with a core each."
    title = f"All-reduces of {ELEMENTS * 4 >> 20} MiB by `shm`"
    table = section.table(title, columns, [note])
    found = {}
    for case in CASES:
        found[case.name] = deaths = measure_deaths(context, case)
        for word, times in asdict(deaths).items():
            if times:
                table.add(case.name, f"{len(times)} {word}", *spread(times), "0")
        section.data[case.name] = asdict(deaths)
    section.gates = [peer_death_gate(found)]


# ---- Two hosts ----------------------------------------------------------------------------------

HOSTS, RANKS_PER_HOST = ["a", "b"], 2
RATE = "1gbit"  # of each host's link
PORT = 29400
FLAT, OURS = "gloo", "hierarchical"
BYTES_LIMIT, TIME_LIMIT = 0.5, 0.6  # to flat Gloo
ACROSS_HOSTS_MS = 1000
LEAST_BYTES = (
    "Flat Gloo's ring over ranks 0,1|2,3 moves 1.5 tensors in each direction. No exact sum moves "
    "less than one tensor: each host must learn the other host's sum. So 0.667 is the least ratio "
    f"of bytes, and the gate of {BYTES_LIMIT:g} cannot be met on two hosts of two ranks. Where the "
    "link alone sets the times, 0.667 is the least ratio of times, too."
)


def why_not():
    """Why this process cannot make the hosts and their link, in one line; "" where it can."""
    if shutil.which("tc") is None:
        return "the link is limited by tc (iproute2), which is not installed"
    return hosts.why_not()


class HostRanks(processes.Ranks):
    """Ranks on the hosts of a network, the first ones on the first host."""

    def __init__(self, context, network, *flags):
        super().__init__("hosts", context.folder)
        size = len(HOSTS) * RANKS_PER_HOST
        for rank in range(size):
            number, local = divmod(rank, RANKS_PER_HOST)
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local),
                       LOCAL_WORLD_SIZE=str(RANKS_PER_HOST), OMP_NUM_THREADS="1",
                       MASTER_ADDR=network[HOSTS[0]].address, MASTER_PORT=str(PORT))  # fmt: skip
            command = [context.program("hierarchical-worker"), f"--elements={ELEMENTS}", *flags]
            self.start("hosts", command, env, preexec_fn=network[HOSTS[number]].entering())

    def kill(self, rank):
        """Kills a rank. Its process here is the parent of the one on the host."""
        os.kill(hosts.children_of(self.processes[rank].pid)[0], signal.SIGKILL)


def slowest(lines_of_ranks):
    """The line of the first rank, with the time of the slowest rank."""
    return dict(lines_of_ranks[0], seconds=max(line["seconds"] for line in lines_of_ranks))


def rounds_of(lines, backends):
    """Backend -> the seconds and the bytes of its sums, in lists with one entry per round.

    Without the first sum of each backend, which allocates its buffers.
    """
    found = {}
    for name in backends:
        sums = [line for line in lines if line["backend"] == name][1:]
        found[name] = {key: [x[key] for x in sums] for key in ("seconds", "sent", "received")}
    return found


def ratios(found, base):
    """The ratios of one backend to another inside each round: (of the time, of the bytes)."""
    moved = [[s + r for s, r in zip(x["sent"], x["received"])] for x in (found, base)]
    pairs = (found["seconds"], base["seconds"]), moved
    return [[x / y for x, y in zip(above, below)] for above, below in pairs]


def kill_on_hosts(context, network, kills):
    """Kills one rank after the other, each in a group of its own. Returns the times in ms."""
    near, far, wrong = [], [], 0
    for number in range(kills):
        victim = number % (len(HOSTS) * RANKS_PER_HOST - 1) + 1  # rank 0 serves the store
        with HostRanks(context, network, "--until_failure", f"--backends={OURS}") as ranks:
            ranks.answers("a sum")
            time.sleep(0.1 + 0.13 * number % 0.4)  # anywhere in a sum
            killed_ns = time.monotonic_ns()
            ranks.kill(victim)
            survivors = [x for x in range(len(ranks.processes)) if x != victim]
            for rank, answer in zip(survivors, ranks.answers("the error", survivors)):
                on_its_host = rank // RANKS_PER_HOST == victim // RANKS_PER_HOST
                (near if on_its_host else far).append((answer["failed_ns"] - killed_ns) / 1e6)
                wrong += answer["rank"] != victim
    return {"kills": kills, "near_ms": near, "far_ms": far, "wrong_rank": wrong}


def measure_hosts(context):
    """All figures, round by round and error by error."""
    backends, rounds = [FLAT, OURS], context.rounds(12, 3)
    with hosts.Network(HOSTS) as network:
        for name in HOSTS:
            limit = f"rate {RATE} burst 256kb latency 100ms"
            network[name].run(f"tc qdisc add dev eth0 root tbf {limit}".split())
        flags = [f"--backends={','.join(backends)}", f"--rounds={rounds + 1}"]
        with HostRanks(context, network, *flags) as ranks:
            sums = (rounds + 1) * len(backends)
            lines = [slowest(ranks.answers("a sum")) for _ in range(sums)]
        death = kill_on_hosts(context, network, context.rounds(6, 1))
    found = {"rate": RATE, "tensor_bytes": 4 * ELEMENTS, "ranks_per_host": RANKS_PER_HOST}
    return {**found, "rounds": rounds_of(lines, backends), "death": death}


def add_hosts_tables(section, found):
    """`found`: as measure_hosts() returns it."""
    size, flat = found["tensor_bytes"], found["rounds"][FLAT]
    sums = section.table(
        f"A sum of {size / 2**20:g} MiB, two hosts of {found['ranks_per_host']} ranks, "
        f"{len(flat['seconds'])} rounds",
        ["", "ms", "time to flat Gloo", "sent, in tensors", "received", "bytes to flat Gloo"],
        [LEAST_BYTES],
    )
    for name, word in ((FLAT, "one Gloo over all ranks"), (OURS, "ours (hierarchical)")):
        rounds = found["rounds"][name]
        times, moved = [None if name == FLAT else figures.of(x) for x in ratios(rounds, flat)]
        ms = figures.scaled(figures.of(rounds["seconds"]), 1e3)
        tensors = [f"{statistics.median(rounds[key]) / size:.3f}" for key in ("sent", "received")]
        sums.add(word, ms, times, *tensors, moved)
    death = found["death"]
    kills = section.table(
        "A rank is killed in the middle of sums",
        ["ms from the kill to the error", "errors", *SPREAD],
        [f"Kills: {death['kills']}; errors that name another rank: {death['wrong_rank']}."],
    )
    for key, word in (("near_ms", "on the rank's host"), ("far_ms", "on the other host")):
        kills.add(word, str(len(death[key])), *spread(death[key]))


def hosts_gates(found):
    """`found`: as measure_hosts() returns it; {} when nothing was measured."""
    times = moved = latest = None
    rounds = -1
    if found:
        ours, flat = found["rounds"][OURS], found["rounds"][FLAT]
        times, moved = [figures.of(x) for x in ratios(ours, flat)]
        rounds = len(flat["seconds"])
        latest = max(found["death"]["near_ms"] + found["death"]["far_ms"])
    name = "two hosts, bytes over the link to flat Gloo"
    gates = [figures.gate_below(name, BYTES_LIMIT, moved, rounds)]
    if found:
        gates[0].figure += "; 0.667 is the least"
    name = "two hosts, time to flat Gloo at 25 MB"
    gates.append(figures.gate_below(name, TIME_LIMIT, times, rounds))
    name = "peer death across hosts, time to the error"
    return [*gates, figures.gate_under(name, ACROSS_HOSTS_MS, latest, "ms")]


def run_hosts(context, section):
    """The hierarchical backend beside one Gloo over all ranks, and the death of a rank."""
    section.gates = hosts_gates({})
    context.program("hierarchical-worker")
    if why_not():
        raise NotRun(why_not())
    section.data = found = measure_hosts(context)
    add_hosts_tables(section, found)
    section.gates = hosts_gates(found)
