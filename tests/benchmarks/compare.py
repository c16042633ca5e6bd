"""Run several benchmark commands in turn, round by round, and print the ratios of their rates.

    python tests/benchmarks/compare.py --rounds 3 "COMMAND A" "COMMAND B" ...

Each command prints a line of JSON. The last command is divided by each of the others, always within one round: the
speed of a machine drifts, so that two runs taken apart say little. Every round's rates are printed as they come, then
the median ratio with the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys


def run(command: str, timeout: float) -> dict[str, object]:
    """The last line of JSON that the command prints; a command that fails ends the comparison."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"failed with {done.returncode}: {command}\n{done.stderr[-3000:]}")
    return dict(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--key", default="cpu_per_s", help="wall_per_s on a quiet machine")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one command")
    options = parser.parse_args()
    if len(options.commands) < 2:
        parser.error("two commands or more")
    rounds: list[list[float]] = []
    for number in range(options.rounds):
        rates = []
        for command in options.commands:
            found = run(command, options.timeout)
            rates.append(float(str(found[options.key])))
            print(json.dumps({"round": number + 1} | found), file=sys.stderr, flush=True)
        rounds.append(rates)
    ours = options.commands[-1]
    for i, command in enumerate(options.commands[:-1]):
        ratios = [rates[-1] / rates[i] for rates in rounds]
        line = {
            "of": ours,
            "over": command,
            "rates": [[rates[-1], rates[i]] for rates in rounds],
            "median": round(statistics.median(ratios), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
