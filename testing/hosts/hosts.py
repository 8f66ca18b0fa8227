"""Several hosts on one machine, made of Linux namespaces, for tests and benchmarks.

    with Network(["a", "b", "store"]) as network:
        a = network["a"]
        server = a.start(["redis-server", "--bind", a.address], output=path)
        a.cut()

A host has a network, a hostname, a process table and System V IPC of its own; files it shares with
the machine, /proc and /etc/hosts excepted. All hosts are plugged into one bridge, which stands in a
namespace of its own: nothing is added to the machine's network, and addresses cannot clash with it
or with another test's.

No namespace has a name. Each lives as long as the processes in it, and these die with the process
that made the Network, however that ends: there is nothing to clean up, now or by a later run.

Needs root, and unshare and setpriv (util-linux) and ip (iproute2); see why_not(). A program that
makes a Network has one thread while it starts processes on hosts.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

# How long anything may take that is waited for here.
PATIENCE_S = 60
_TOOLS = ("unshare", "setpriv", "ip")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# The first process of a host: it ignores the ends of its children, so that the kernel reaps them.
_INIT = (
    "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "os.execvp('sleep', ['sleep', 'infinity'])"
)


class HostsError(Exception):
    """Something could not be done; the text says what and why."""


def why_not():
    """Why this process cannot make hosts, in one line; "" where it can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, and these need root"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"hosts are network namespaces, made with {tool}, which is not installed"
    probe = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c"]
    answer = subprocess.run([*command, probe], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return f"this system does not let root make hosts: {' '.join(answer.stderr.split())}"
    return ""


def _call(command, **options):
    answer = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if answer.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {' '.join(answer.stderr.split())}")
    return answer.stdout


def namespace(pid, kind):
    """The identity of a process' namespace; None when the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def _state(pid):
    """A process' state as ps shows it: "R", "S", "T" when stopped; "Z" also when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def wait_until(what, condition):
    """Returns the first true value of `condition()`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise HostsError(f"no {what} in {PATIENCE_S} s")
        time.sleep(0.005)


def _holder(flags, program):
    """Starts a process in new namespaces, which dies with us. Returns (process, pid inside)."""
    own = os.readlink("/proc/self/ns/net")
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *flags, *program]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ready():
        if process.poll() is not None:
            raise HostsError(f"{' '.join(command)} exited with code {process.returncode}")
        # With --fork the namespaces are those of unshare's child.
        pids = [process.pid] if "--fork" not in flags else children_of(process.pid)
        for pid in pids:
            name = _command_name(pid)
            if namespace(pid, "net") not in (None, own) and name == "sleep":
                return pid
        return None

    return process, wait_until("start of a namespace", ready)


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
            return [int(x) for x in stream.read().split()]
    except OSError:
        return []


def _command_name(pid):
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _entering(pid, kinds, cwd=None):
    """What subprocess is to do between fork and exec to be in the namespaces of process `pid`.

    A new process table is only for children: the program is one, and what subprocess knows is its
    parent, which ends as it does. (nsenter does the same, but stops when its child does.)
    """
    cwd = cwd or os.getcwd()

    def enter():
        files = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
        for file in files:
            if _LIBC.setns(file, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.chdir(cwd)
        if "pid" not in kinds:
            return
        program = os.fork()
        if program == 0:
            os.setpgid(0, 0)
            return
        os.closerange(0, 1 << 16)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _, status = os.waitpid(program, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))

    return enter


class Process:
    """A program that runs on a host. Its output goes to a file."""

    def __init__(self, host, command, environment, output, cwd):
        self.host = host
        self.command = command
        self.output_path = output
        with open(output, "ab") as stream:
            self._wrapper = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=host.entering(cwd),
            )
        # As the machine sees it; None when it had ended before it was seen.
        self.pid = wait_until(f"start of {command[0]}", self._find)[0]

    def _find(self):
        children = children_of(self._wrapper.pid)
        if children:
            return children
        return None if self.running() else [None]

    def running(self):
        return self._wrapper.poll() is None

    def signal(self, number):
        """To the program alone."""
        if self.running() and self.pid is not None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def wait(self, patience_s=PATIENCE_S):
        """Its exit code, or minus the signal that ended it."""
        try:
            self._wrapper.wait(patience_s)
        except subprocess.TimeoutExpired:
            what = f"{self.command[0]} did not end in {patience_s} s"
            raise HostsError(self.quote(what)) from None
        return self._wrapper.returncode

    def output(self):
        with open(self.output_path, encoding="utf-8", errors="replace") as stream:
            return stream.read()

    def await_output(self, text):
        def seen():
            if text in self.output():
                return True
            # What it printed before its end may have come between the two looks.
            return None if self.running() else text in self.output() or "ended"

        try:
            ended = wait_until(repr(text), seen) == "ended"
        except HostsError as error:
            raise HostsError(self.quote(str(error))) from None
        if ended:
            raise HostsError(self.quote(f"{self.command[0]} ended without {text!r}"))

    def quote(self, what):
        tail = "".join(self.output().splitlines(keepends=True)[-40:])
        return f"{what}; on {self.host.name} it printed at the end:\n{tail}"


class Host:
    """One host of a Network. It is switched on when it is made."""

    def __init__(self, network, name, number):
        self.network = network
        self.name = name
        self.address = f"10.77.0.{number}"
        self._number = number
        self._boots = 0
        self._holder = None
        self._init = None
        self.boot()

    @property
    def _port(self):
        """The bridge's end of the cable. A new one for each boot: the old one may linger."""
        return f"p{self._number}x{self._boots}"

    def boot(self):
        """Switches it on: no process, the same name and address as before."""
        if self.is_on():
            raise HostsError(f"host {self.name} is on already")
        self._boots += 1
        flags = ["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder, self._init = _holder(flags, ["python3", "-I", "-S", "-c", _INIT])
        self.network.plug(self._port, self._init, f"02:00:00:00:00:{self._number:02x}")
        setup = (
            f"hostname {self.name} && mount --bind {self.network.hosts_file} /etc/hosts && "
            f"ip link set lo up && ip addr add {self.address}/24 dev eth0 && ip link set eth0 up"
        )
        self.run(["sh", "-c", setup])

    def is_on(self):
        return self._holder is not None and self._holder.poll() is None

    def entering(self, cwd=None):
        return _entering(self._init, ("ipc", "uts", "net", "pid", "mnt"), cwd)

    def run(self, command, **options):
        """Runs a program to its end and returns its output. Errors: any other exit code than 0."""
        return _call(command, preexec_fn=self.entering(), **options)

    def start(self, command, output, environment=None, cwd=None):
        return Process(self, command, environment, output, cwd)

    def processes(self):
        """All of its processes but the first one: pids as the machine sees them."""
        own = namespace(self._init, "pid")
        pids = [int(x) for x in os.listdir("/proc") if x.isdigit()]
        return [p for p in pids if p != self._init and own and namespace(p, "pid") == own]

    def outer_pid(self, pid):
        """The machine's number of a process that has the number `pid` on this host; or None."""
        for candidate in self.processes():
            try:
                with open(f"/proc/{candidate}/status", encoding="utf-8") as stream:
                    numbers = re.search(r"^NSpid:\s*(.*)$", stream.read(), re.MULTILINE)
            except OSError:
                continue
            if numbers and int(numbers.group(1).split()[-1]) == pid:
                return candidate
        return None

    def signal_all(self, number):
        """To all of its processes, also to those that are being started."""
        seen = set()
        while True:
            new = [p for p in self.processes() if p not in seen]
            if not new:
                return
            for pid in new:
                seen.add(pid)
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass

    def kill_all(self):
        """SIGKILL to all of its processes: its kernel lives, and closes their connections."""
        self.signal_all(signal.SIGKILL)
        wait_until(f"end of the processes of {self.name}", lambda: not self.processes())

    def stop(self):
        """SIGSTOP to all of its processes, until resume(). Returns when they stand still."""
        self.signal_all(signal.SIGSTOP)
        stands = lambda: all(_state(p) in "TZ" for p in self.processes())  # noqa: E731
        wait_until(f"stop of the processes of {self.name}", stands)

    def resume(self):
        self.signal_all(signal.SIGCONT)

    def cut(self):
        """Pulls the cable: packets are lost, nobody is told."""
        self.network.set_port(self._port, "down")

    def restore(self):
        self.network.set_port(self._port, "up")

    def power_off(self):
        """As when the power fails: no process ends its connections, nothing is sent any more."""
        self.cut()
        # The end of a process table's first process kills all others of it.
        os.kill(self._init, signal.SIGKILL)
        self._holder.wait(PATIENCE_S)


class Network:
    """Hosts on one bridge. A context manager; hosts can be added while it is open."""

    def __init__(self, names):
        self._hosts = {}
        self._switch = None
        self._switch_pid = None
        self._folder = None
        self._first_names = list(names)

    def __enter__(self):
        self._folder = tempfile.mkdtemp(prefix="ddp-hosts.")
        self.hosts_file = os.path.join(self._folder, "hosts")
        with open(self.hosts_file, "w", encoding="ascii") as stream:
            stream.write("127.0.0.1 localhost\n")
        try:
            self._switch, self._switch_pid = _holder([], ["sleep", "infinity"])
            # It floods: where an address is, it need not learn again when a host comes back.
            self._in_switch("ip link add br0 type bridge ageing_time 0 && ip link set br0 up")
            for name in self._first_names:
                self.add(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for host in self._hosts.values():
            if host.is_on():
                host.power_off()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __getitem__(self, name):
        return self._hosts[name]

    def hosts(self):
        return list(self._hosts.values())

    def add(self, name):
        number = len(self._hosts) + 1
        # Bound into every host, so that names are known to all of them at once.
        with open(self.hosts_file, "a", encoding="ascii") as stream:
            stream.write(f"10.77.0.{number} {name}\n")
        self._hosts[name] = Host(self, name, number)
        return self._hosts[name]

    def plug(self, port, pid, hardware_address):
        """Connects the network of process `pid` with the bridge; its end is called eth0."""
        self._in_switch(
            f"ip link add {port} type veth "
            f"peer name eth0 address {hardware_address} netns {pid} && "
            f"ip link set {port} master br0 && ip link set {port} up"
        )

    def set_port(self, port, state):
        self._in_switch(f"ip link set {port} {state}")

    def _in_switch(self, script):
        _call(["sh", "-c", script], preexec_fn=_entering(self._switch_pid, ("net",)))
