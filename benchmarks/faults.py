"""What is done to a run, and what becomes of it: every fault of tests/faults.py, as a table.

    python benchmarks/faults.py                    # each fault once, about ten minutes
    python benchmarks/faults.py --times 3 --kills 200 --write

`--kills`: afterwards a soak, that many SIGKILLs of a rank, of all ranks or of the launcher at
random moments (seeded) of a run that saves every second step. `--write` keeps the tables in
faults.md and soak.md. Lost are steps that had to be repeated. A run that resumes
must end with the weights, losses and TensorBoard curves of a run that nothing happened to, to the
bit.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import faults  # noqa: E402
from peers import command  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults with this word in their name")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table = ["| fault | where | tried | steps lost, at most | outcome |", "|---|---|---|---|---|"]
    print(*table, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lab = faults.Lab(Path(folder), thorough=True)
        for number, ((fault, where), do) in enumerate(faults.FAULTS.items()):
            if arguments.only not in fault or not arguments.times:
                continue
            lost, outcome = [0], "as documented"
            for time in range(arguments.times):
                try:
                    lost.append(do(lab, f"fault-{number}-{time}"))
                except PermissionError as error:
                    outcome = f"not tried: {error}"
                except AssertionError as error:
                    outcome = f"WRONG: {str(error).splitlines()[0]}"
            table.append(f"| {fault} | {where} | {arguments.times} | {max(lost)} | {outcome} |")
            print(table[-1], flush=True)
        soak: list[str] = []
        if arguments.kills:
            killed = faults.soak(
                lab, arguments.kills, arguments.seed, lambda text: print(text, file=sys.stderr)
            )
            soak = ["| SIGKILL of | kills | steps lost, at most | in all |"]
            soak.append("|---|---|---|---|")
            for who, kills in collections.Counter(who for who, _ in killed).items():
                lost = [steps for name, steps in killed if name == who]
                soak.append(f"| {who} | {kills} | {max(lost)} | {sum(lost)} |")
            soak += ["", f"{len(killed)} kills (seed {arguments.seed}): every run that was killed"]
            soak.append("resumed, and ended with the weights, losses and curves of the whole run.")
            print(*soak, sep="\n")
    if arguments.write:
        for name, title, lines in (("faults", "Faults", table), ("soak", "Soak", soak)):
            if len(lines) > 2:
                text = f"# {title}\n\nWritten by `{command()}`.\n\n" + "\n".join(lines) + "\n"
                (ROOT / "benchmarks" / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
