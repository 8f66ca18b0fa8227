"""Measures a training step with ZeroRedundancyOptimizer beside one with the plain optimizer.

    bazel build --config=opt //tools/bench:ddp_step_benchmark_worker
    tools/bench/zero_step_benchmark

A step is forward, backward and Adam, on two ranks with one thread each, both pinned to a core of
their own. The ranks share memory, as ranks of one host do by default; --backend=gloo measures them
over Gloo. One program makes the steps of all modes, which take turns in every round. A figure is
the median over the rounds with the first and third quartile; a ratio, to the plain optimizer under
the same DistributedDataParallel, is taken within its round. The update is the optimizer's part of
the step. After every round the parameters of all modes must be the same.
"""

import argparse
import os
import statistics
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import benchmark_tools as tools  # noqa: E402  (found beside this file)
import ddp_step_benchmark as steps  # noqa: E402
from benchmark_tools import ROOT, BenchmarkError  # noqa: E402

PLAIN = "default+adam"
MODES = ["zero", "zero_scatter", "zero_overlap", "zero_whole"]


class Series(steps.Series):
    def __init__(self):
        super().__init__()
        self.update_ms = []


def update_times_ms(answers):
    """The length of each step's update but the first, given every rank's answer."""
    per_rank = [
        [(end - begin) / 1e6 for begin, end in zip(answer["updates_ns"], answer["ends_ns"])]
        for answer in answers
    ]
    return [max(times) for times in zip(*per_rank)][1:]


def run_round(side, model, results, modes=tuple(MODES)):
    plain_ms, plain_sums = None, None
    for mode in [PLAIN, *modes]:
        answers = side.steps(mode, model.steps + 1)
        step_ms = statistics.median(steps.step_times_ms(answers))
        sums = [answer["gradient_sum"] for answer in answers]  # of the parameters
        if mode == PLAIN:
            plain_ms, plain_sums = step_ms, sums
        elif sums != plain_sums:
            raise BenchmarkError(f"mode {mode}: sums of parameters {sums}, expected {plain_sums}")
        series = results.setdefault(mode, Series())
        series.step_ms.append(step_ms)
        series.update_ms.append(statistics.median(update_times_ms(answers)))
        series.ratios.append(step_ms / plain_ms)


def measure(options, model, cpus, folder):
    results = {}
    command = [options.worker, f"--backend={options.backend}"]
    with steps.Side("ours", command, model, cpus, folder) as side:
        side.answers("the start")
        for mode in [PLAIN] + options.modes:  # what is slow once: memory, buckets, states
            side.steps(mode, options.warm_up_steps)
        for _ in range(options.rounds):
            run_round(side, model, results, options.modes)
    print(f"\n{model.name}: {model.describe()}, {model.steps} steps per round")
    print(f"  {'':26}{'step / plain optimizer':30}{'ms':28}update, ms")
    for mode, series in results.items():
        ratio = str(steps.quartiles(series.ratios))
        step_ms, update_ms = steps.quartiles(series.step_ms), steps.quartiles(series.update_ms)
        print(f"  {mode:26}{ratio:30}{str(step_ms):28}{update_ms}", flush=True)


def main(argv):
    parser = argparse.ArgumentParser(prog="zero_step_benchmark")
    worker = os.path.join(ROOT, "bazel-bin/tools/bench/ddp_step_benchmark_worker")
    parser.add_argument("--worker", default=worker, help="the program, as Bazel built it")
    parser.add_argument("--models", type=steps.parse_models, default=steps.MODELS)
    parser.add_argument("--modes", type=steps.parse_modes, default=MODES)
    parser.add_argument("--backend", default="", help="of the group; empty: the default one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm_up_steps", type=int, default=5)
    options = parser.parse_args(argv)
    if not os.access(options.worker, os.X_OK):
        parser.error(
            f"{options.worker} is missing; run: "
            "bazel build --config=opt //tools/bench:ddp_step_benchmark_worker"
        )
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < steps.RANKS:
        parser.error(f"{steps.RANKS} ranks need {steps.RANKS} cores, here is {len(cpus)}")
    tools.print_versions()
    with tempfile.TemporaryDirectory(prefix="ddp-zero.") as folder:
        try:
            for model in options.models:
                measure(options, model, cpus, folder)
        except BenchmarkError as error:
            sys.exit(f"zero_step_benchmark: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
