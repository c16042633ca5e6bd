"""What the TPU compiler says of BERT's training step with one and two layers, against tests/golden/plan.json.

    python tests/benchmarks/tpu_cost.py [--case base-1-v5e-16 ...] [--write] [--accept]

No TPU is needed, but libtpu (the extra "tpu"), and about 100 CPU seconds for each case that is not as it was. Prints a
line of JSON for each. --write keeps the new figures; if one of them grew by more than 5 % only with --accept too.

    key               digest of the program before compilation, of the pod, and of the compiler's version
    peak_bytes        the largest memory of a device, by the compiler's buffer assignment; exact for this version
    cycles            `estimated_cycles` of every scheduled instruction, loop bodies as often as they run. A model that
                      the compiler has, never checked against a chip here: use it as the ratio of two programs
    collective_bytes  of the whole arrays of all collectives, loop bodies as often as they run

For a whole run, see `bert-jax plan`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import plan_cases as cases

from transformer_jax import compiled_step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=[*cases.CASES, *cases.FULL_SIZE], default=cases.CASES)
    parser.add_argument("--write", action="store_true", help="keep the new figures")
    parser.add_argument("--accept", action="store_true", help="even where they are worse")
    options = parser.parse_args()
    compiled_step.check_compiler()
    code = 0
    for case in options.case:
        kept = cases.golden().get(cases.versions(), {}).get(case)
        found = cases.figures(case, known=kept["key"] if kept else "")
        if found.schedule is None:
            print(json.dumps({"case": case, "same": True}), flush=True)
            continue
        new = cases.entry(found)
        worse = cases.grown(new, kept) if kept else []
        print(json.dumps({"case": case, **new, "worse": worse}), flush=True)
        if worse and not options.accept:
            code = 1
        elif options.write:
            whole = cases.golden()
            whole.setdefault(cases.versions(), {})[case] = new
            cases.GOLDEN.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
