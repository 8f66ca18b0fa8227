"""What one Redis server spends on the agents of a large job: joins, heartbeats, a failure's news.

A step has two times: the store's, which is the processor time of redis-server, and the wall time
until the last agent. In the wall time the clients of all nodes share this machine's cores with the
store. The cost of heartbeats is compared with a floor: as many PINGs per second over the same
connections, spread as evenly, while no agent sends heartbeats. The two take turns, each time in a
new round, so that heartbeats are spread as they are in a job.
"""

import re
import resource
import statistics
import time

from reporting import processes
from reporting.figures import number, target
from reporting.processes import BenchmarkError, run_program, wait_for

PROCESSES = 2  # that the agents are spread over
HEARTBEAT_MS = 1000
FILES_OF_SERVER = 100  # Redis keeps this many descriptors for itself, and we are clients too
FEW = 1000  # agents; larger jobs have other targets
SCRIPTS_LINE = re.compile(r"^cmdstat_evalsha:calls=(\d+),usec=(\d+)", re.MULTILINE)


def room_for(agents):
    """Raises the limit of open files. Returns for how many agents there is room."""
    wanted = agents + FILES_OF_SERVER
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return agents
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
        return agents
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard - FILES_OF_SERVER


def ratio_of_scripts(text):
    """(scripts, us each by the server's own clock) of INFO commandstats."""
    found = SCRIPTS_LINE.search(text)
    calls, total_us = (int(found[1]), int(found[2])) if found else (0, 0)
    return calls, total_us / max(1, calls)


class Job(processes.Ranks):
    """The agents of one job, in a few processes."""

    patience_s = 300

    def __init__(self, context, socket, port, agents):
        super().__init__("rendezvous", context.folder)
        self.socket, self.agents, self.instance = socket, agents, 0
        self.redis("CONFIG", "SET", "maxclients", str(agents + 20))
        for i in range(PROCESSES):
            first, end = agents * i // PROCESSES, agents * (i + 1) // PROCESSES
            command = [context.program("rendezvous-worker"), f"--port={port}", f"--first={first}"]
            command += [f"--count={end - first}", f"--total={agents}"]
            command += [f"--instance={self.instance}", f"--heartbeat_ms={HEARTBEAT_MS}"]
            self.start("agents", command, None)
            self.instance = self.answers("the job's number", [i])[0]["instance"]
        self.answers("the connected agents")
        channel = f"ddp:{{scale}}:i{self.instance}:news"
        listeners = lambda: self.redis("PUBSUB", "NUMSUB", channel).split()[-1]  # noqa: E731
        wait_for("subscription of all agents", lambda: int(listeners()) == agents, patience_s=300)
        self.settle()  # the agents have not received the confirmations yet

    def redis(self, *words):
        return run_program(["redis-cli", "-s", self.socket, *words])

    def cpu_s(self):
        """What redis-server has spent so far."""
        found = re.findall(r"^used_cpu_(?:user|sys):([\d.]+)", self.redis("INFO", "cpu"), re.M)
        return sum(float(x) for x in found)

    @staticmethod
    def settle():
        time.sleep(4 * HEARTBEAT_MS / 1e3)

    def join(self):
        """All agents join. Returns (wall seconds until the last one, the store's seconds)."""
        before, begun = self.cpu_s(), time.monotonic_ns()
        answers = self.ask("j")
        ranks = sorted(rank for answer in answers for rank in answer["ranks"])
        if ranks != list(range(self.agents)):
            raise BenchmarkError("a rank of the round was given twice, or to nobody")
        last = max(answer["last_ns"] for answer in answers)
        return (last - begun) / 1e9, self.cpu_s() - before

    def fail(self):
        """The first agent reports a failure. Returns the seconds until the last agent knows."""
        begun = time.monotonic_ns()
        others = list(range(1, len(self.processes)))
        self.tell("f", [0])
        self.tell("w", others)
        return (max(answer["last_ns"] for answer in self.answers("the news")) - begun) / 1e9

    def percent(self, seconds):
        """What the store uses of a core."""
        before, begun = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        return 100 * (self.cpu_s() - before) / (time.monotonic() - begun)

    def pings(self, seconds):
        """The same while the agents stand still and PINGs go over their connections."""
        self.ask("p")
        found = self.percent(seconds)
        self.ask("s")
        return found

    def scripts(self):
        """In words: the scripts since the last CONFIG RESETSTAT."""
        calls, us = ratio_of_scripts(self.redis("INFO", "commandstats"))
        return f"{calls:,} scripts, {us:.1f} us each by the store's own clock"


def measure(job, times, seconds, failures):
    """Returns (the cells of RENDEZVOUS, those of SPENT, notes)."""
    pings, beats, notes = [], [], []
    joined = joined_cpu = 0
    most_s = 0.5 if job.agents <= FEW else 3
    for i in range(times):
        pings.append(job.pings(seconds))
        if i > 0:
            job.settle()  # everything that was delayed is due at once
            job.fail()
        job.redis("CONFIG", "RESETSTAT")
        wall, cpu = job.join()
        if i == 0:
            joined, joined_cpu = wall, cpu
            notes.append(f"{job.agents:,} agents join: {job.scripts()}.")
        job.settle()
        job.redis("CONFIG", "RESETSTAT")
        beats.append(job.percent(seconds))
        notes.append(f"{job.agents:,} agents, {seconds} s of heartbeats: {job.scripts()}.")
    known, again = [], []
    for _ in range(failures):
        known.append(job.fail())
        again.append(job.join())
    walls, cpus = zip(*again)
    beat, ping = statistics.median(beats), statistics.median(pings)
    what = f"{job.agents:,} agents: "
    notes.append(target(what + "store's time of the join", joined_cpu, most_s, "s"))
    notes.append(target(what + "news of a failure, worst", max(known), 0.5, "s"))
    notes.append(target(what + "store's time of joining again, worst", max(cpus), most_s, "s"))
    if job.agents > FEW:
        notes.append(target(what + "heartbeats", beat, 40, "% of a core"))
    row = [joined, statistics.median(known), statistics.median(walls)]
    spent = [joined_cpu, statistics.median(cpus)]
    return (
        [*(f"{x:.3f}" for x in row), f"{beat:.1f}"],
        [*(f"{x:.3f}" for x in spent), f"{ping:.1f}", number(beat / ping if ping else None)],
        notes,
    )


def run_rendezvous(context, section):
    context.require_redis()
    context.program("rendezvous-worker")
    table = section.table("One Redis", [
        "agents", "s until all have joined", "s until all know of a failure",
        "s until all have joined again", "% of a core for heartbeats",
    ])  # fmt: skip
    spent = section.table("What the store spends", [
        "agents", "s of its time until all have joined", "s until all have joined again",
        "% of a core for as many PINGs", "heartbeat to PING",
    ])  # fmt: skip
    run = (1, 2, 2) if context.quick else (3, 10, 10)
    for wanted in [50] if context.quick else [1000, 10_000]:
        agents = room_for(wanted)
        if agents < wanted:
            table.notes.append(f"Only {agents:,} of {wanted:,} agents: see ulimit -Hn.")
        port = processes.free_port()
        with processes.redis_server(context.place(f"redis-{wanted}"), port) as socket:
            with Job(context, socket, port, agents) as job:
                cells, more, notes = measure(job, *run)
        table.add(f"{agents:,}", *cells)
        spent.add(f"{agents:,}", *more)
        spent.notes += notes
