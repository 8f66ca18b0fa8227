#!/usr/bin/env python3
"""Answers as the workers of the report do, for report_test.py.

As step_worker and collective_worker, with made-up times: plain steps take 10 ms and others 11; a
memcpy takes 1 ms, Gloo 8 and ours 2. As hierarchical_worker with --until_failure, with sockets in
place of a process group.
"""

import json
import os
import select
import socket
import sys
import time

MILLISECOND = 1_000_000
CALL_MS = {"memcpy": 1, "gloo": 8, "shm": 2}
BACKENDS = {"gloo": "", "shm": ""}


def steps(mode, count):
    length = (10 if mode == "plain" else 11) * MILLISECOND
    starts = [i * 100 * MILLISECOND for i in range(count)]
    return {
        "starts_ns": starts,
        "ends_ns": [start + length for start in starts],
        "minor_faults": 0,
        "gradient_sum": 1.0,
    }


def call(backend, collective, count):
    if (backend, collective) == ("gloo", "alltoall"):
        return {"error": "this backend has no alltoall"}
    spent = CALL_MS[backend] * count * MILLISECOND
    return {"start_ns": 0, "end_ns": spent, "cpu_ns": spent}


def print_line(values):
    print(json.dumps(values), flush=True)


def await_death(rank, size, port):
    """Returns the rank that died. Rank 0 has a connection to each rank, and tells the others."""
    if rank > 0:
        with socket.create_connection(("127.0.0.1", port)) as to_first:
            to_first.sendall(bytes([rank]))
            print_line({"running": rank})
            return to_first.recv(1)[0]
    ranks = {}
    with socket.create_server(("127.0.0.1", port)) as listener:
        print_line({"port": listener.getsockname()[1]})
        while len(ranks) < size - 1:
            connection = listener.accept()[0]
            ranks[connection] = connection.recv(1)[0]
    print_line({"running": rank})
    dead = select.select(list(ranks), [], [])[0][0]
    for connection in ranks:
        if connection is not dead:
            connection.sendall(bytes([ranks[dead]]))
    return ranks[dead]


def until_failure():
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    dead = await_death(*(int(os.environ[name]) for name in names))
    print_line({"failed_ns": time.monotonic_ns(), "rank": dead})
    sys.stdin.read()


def main(arguments):
    if "--until_failure" in arguments:
        return until_failure()
    named = [x.partition("=")[2] for x in arguments if x.startswith("--backends=")]
    wanted = named[0].split(",") if named and named[0] else []
    reasons = {name: BACKENDS.get(name, f"no backend {name}") for name in wanted}
    registers = {name: name == "shm" for name in wanted}
    hello = {"version": "fake", "backends": reasons, "registers": registers}
    print_line(hello)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "steps":
            answer = steps(words[0], int(words[1]))
        elif verb == "check":
            answer = {"wrong": 0}
        else:
            answer = call(words[0], words[1], int(words[4]))
        print_line(answer)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
