"""peers.py: other programs' attention on the cases of `folio bench --peers`.

Folio starts it and talks to it by lines. To stdin, JSON: a case, then any number of runs.

    {"case": "16q1s4k", "kinds": [[16, 1, 4096]], "dtype": "bf16", ...}   -> peer NAME ... ready
    {"run": "vllm_cpu", "warm": false}                                     -> time SECONDS

With --device cuda the peers are those of a GPU (peer_gpu.py), and times are the GPU's.

A peer that is not installed, cannot run a case or computes it wrongly is named on stderr, once, and
left out. Packages: requirements.txt. What each peer is asked to do: README.md.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time


def say(text):
    print(f"folio bench: peers: {text}", file=sys.stderr, flush=True)


try:
    from peer_inputs import TOLERANCE, Case, Inputs, Refused, formula
    from peer_ops import PEERS
except ImportError as missing:  # PyTorch makes the inputs and the check: no peers without it
    say(f"all are left out: {missing}")
    print("ready", flush=True)
    for _ in sys.stdin:
        print("ready", flush=True)
    sys.exit(0)


def time_on_cpu(run, warm, dirty):
    if warm:
        run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Driver:
    """The peers that are there, and what was prepared of the case at hand."""

    def __init__(self, threads, kinds, timer):
        self.peers, self.checked, self.said, self.runs = [], {}, set(), {}
        self.timer = timer
        for kind in kinds:
            try:
                self.peers.append(kind(threads))
            except Exception as why:  # a package may fail to load in many ways
                say(f"{kind.name} is left out: {first_line(why)}")

    def say_once(self, text):
        if text not in self.said:
            self.said.add(text)
            say(text)

    def check(self, peer, case):
        """None, or what is wrong with its output on a short case of this kind."""
        small = case.small()
        key = (peer.name, json.dumps({**vars(small), "case": ""}))
        if key not in self.checked:
            inputs = Inputs(small)
            run, result = peer.prepare(small, inputs)
            run()
            error = float((result().double() - formula(small, inputs)).abs().max())
            good = error <= TOLERANCE[case.dtype]
            self.checked[key] = None if good else f"its output is off by {error:.3g}"
        return self.checked[key]

    def open(self, case):
        """Names of the peers that run this case, each warmed up by one run."""
        self.runs.clear()
        inputs = None
        for peer in self.peers:
            try:
                wrong = self.check(peer, case)
                if wrong:
                    raise Refused(f"{wrong} (such cases as {case.case})")
                inputs = inputs or Inputs(case)
                run, _ = peer.prepare(case, inputs)
                run()
                self.runs[peer.name] = run
            except Refused as why:
                self.say_once(f"{peer.name} is left out: {case.dtype} on {case.kv_dtype}: {why}")
            except Exception as why:
                self.say_once(f"{peer.name} failed: {case.case}: {first_line(why)}")
        return list(self.runs)

    def time(self, name, warm, dirty):
        return self.timer(self.runs[name], warm, dirty)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def open_driver(asked):
    if asked.device == "cpu":
        return Driver(asked.threads, PEERS, time_on_cpu)
    try:
        import peer_gpu
        return Driver(asked.threads, peer_gpu.PEERS, peer_gpu.Timer().time)
    except Exception as why:
        say(f"all are left out: {first_line(why)}")
        return Driver(asked.threads, (), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    driver = open_driver(asked)
    for peer in driver.peers:
        version = getattr(peer, "version", None) or importlib.metadata.version(peer.package)
        print("version", peer.name, version, file=answers)
    print("ready", file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        if "run" in asked:
            try:
                print("time", repr(driver.time(asked["run"], asked["warm"], asked.get("dirty", False))), file=answers)
            except Exception as why:
                print("failed", first_line(why), file=answers)
            continue
        for name in driver.open(Case(**asked)):
            print("peer", name, file=answers)
        print("ready", file=answers)


if __name__ == "__main__":
    main()
