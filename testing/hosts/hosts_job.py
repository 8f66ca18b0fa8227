"""A job of ddprun over several hosts (hosts.py), for tests and benchmarks.

    with Network(["store", "a", "b"]) as network:
        job = Job(network, folder, ddprun, program=[trainer, ...], flags=["--nnodes=1:2"])
        job.start_store("store")
        job.start_node("a")
        job.start_node("b")
        generation = job.await_running(["a", "b"], world_size=4)

What the job does is read from the nodes' event logs (elastic/agent/event_log.h), a new one for each
start of a node. The Redis server keeps nothing: when it comes back it is empty.
"""

import glob
import json
import os
import signal

import hosts

PORT = 6379


class Node:
    """One start of ddprun on a host."""

    def __init__(self, host, process, event_log):
        self.host = host
        self.process = process
        self._event_log = event_log

    def events(self, *names):
        """All of its events so far, or those with one of these names."""
        try:
            with open(self._event_log, encoding="utf-8") as stream:
                lines = stream.read().split("\n")[:-1]
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines]
        return [e for e in events if not names or e["event"] in names]

    def last(self, name):
        """The newest event of that name, or None."""
        found = self.events(name)
        return found[-1] if found else None

    def generation(self):
        """The newest that it has joined; 0 before the first."""
        joined = self.last("joined")
        return joined["generation"] if joined else 0

    def workers(self, generation):
        """rank -> pid on the host, of the generation's workers; {} when they have not started."""
        for event in self.events("generation_started"):
            if event["generation"] == generation:
                return dict(zip(event["ranks"], event["pids"]))
        return {}

    def exits(self, generation):
        """rank -> its worker_exited event."""
        events = self.events("worker_exited")
        return {e["rank"]: e for e in events if e["generation"] == generation}

    def first_steps(self, generation):
        """rank -> its first_step event."""
        events = self.events("first_step")
        return {e["rank"]: e for e in events if e["generation"] == generation}

    def trains(self):
        """The generation in which all of its workers have done a step and none has ended, or 0."""
        generation = self.generation()
        workers = self.workers(generation)
        done = set(self.first_steps(generation)) == set(workers)
        return generation if workers and done and not self.exits(generation) else 0

    def kill_worker(self, rank):
        pid = self.host.outer_pid(self.workers(self.generation())[rank])
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


class Job:
    def __init__(self, network, folder, ddprun, program, flags):
        self.network = network
        self.folder = folder
        self._command = [ddprun, *flags]
        self._program = program
        self._store_host = None
        self._store = None
        self._starts = 0
        self.nodes = {}  # by host's name: the newest start

    # ---- The store ----------------------------------------------------------------------------

    def start_store(self, host_name):
        self._store_host = self.network[host_name]
        self._store = self._store_host.start(
            ["redis-server", "--bind", self._store_host.address, "--port", str(PORT)]
            + ["--protected-mode", "no", "--save", "", "--appendonly", "no"],
            output=os.path.join(self.folder, "redis.log"),
            cwd=self.folder,
        )
        ping = f"redis-cli -h {self._store_host.address} -p {PORT} ping; true"
        answer = lambda: self._store_host.run(["sh", "-c", ping])  # noqa: E731
        hosts.wait_until("answer of Redis", lambda: "PONG" in answer())

    def kill_store(self):
        self._store.signal(signal.SIGKILL)
        self._store.wait()

    def restart_store(self):
        self.start_store(self._store_host.name)

    # ---- Nodes --------------------------------------------------------------------------------

    def start_node(self, host_name, *flags):
        self._starts += 1
        host = self.network[host_name]
        name = os.path.join(self.folder, f"{self._starts:02}-{host_name}")
        event_log = f"{name}.jsonl"
        command = [*self._command, f"--rdzv-endpoint={self._store_host.address}:{PORT}"]
        command += [f"--event-log-file={event_log}", f"--log-dir={name}.logs", "--tee=3"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "DDP_"))}
        environment.update(OMP_NUM_THREADS="1", TMPDIR=self.folder)
        process = host.start(
            [*command, *flags, *self._program], output=f"{name}.out", environment=environment
        )
        self.nodes[host_name] = Node(host, process, event_log)
        return self.nodes[host_name]

    def await_running(self, names, world_size, after=0):
        """Until these nodes, and nobody else, train together in a generation later than `after`.

        Returns the generation.
        """

        def together():
            generations = {self.nodes[name].trains() for name in names}
            if len(generations) != 1 or min(generations) <= after:
                return 0
            joined = [self.nodes[name].last("joined") for name in names]
            return generations.pop() if {j["world_size"] for j in joined} == {world_size} else 0

        return self.wait_until(f"step of {world_size} ranks on {', '.join(names)}", together)

    def await_event(self, name, event, count=1):
        """Until the node has told so many events of that name. Returns the newest."""
        node = self.nodes[name]
        found = lambda: len(node.events(event)) >= count  # noqa: E731
        self.wait_until(f"{event} of {name}", found)
        return node.last(event)

    def first_host(self, names):
        """The one of these hosts that holds rank 0."""
        return next(n for n in names if self.nodes[n].last("joined")["group_rank"] == 0)

    def wait_until(self, what, condition):
        try:
            return hosts.wait_until(what, condition)
        except hosts.HostsError as error:
            raise hosts.HostsError(self.quote(str(error))) from None

    def quote(self, what):
        """`what`, and the end of all that the nodes have told and printed."""
        text = [what]
        for path in sorted(glob.glob(os.path.join(self.folder, "[0-9]*-*.*"))):
            if path.endswith((".jsonl", ".out")):
                with open(path, encoding="utf-8", errors="replace") as stream:
                    tail = stream.readlines()[-40:]
                text.append(f"---- {os.path.basename(path)}\n{''.join(tail)}")
        return "\n".join(text)


def find_program(label):
    """The path of what Bazel has built for a label without `//`, in a test or in the checkout."""
    path = label.replace(":", "/")
    roots = [os.path.join(os.environ.get("TEST_SRCDIR", ""), os.environ.get("TEST_WORKSPACE", ""))]
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots += [os.environ.get("DDP_BUILT", ""), os.path.join(checkout, "bazel-bin")]
    for root in roots:
        if os.access(os.path.join(root, path), os.X_OK) and root:
            return os.path.join(root, path)
    raise hosts.HostsError(f"{path} is not built; run: bazel build //{label}")
