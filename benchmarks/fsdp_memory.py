"""Memory that a checkpoint takes with `--strategy fsdp`: while it is written, and in a resume.

    python benchmarks/fsdp_memory.py [--ranks 2 4] [--write]

A BERT of 50 million fp32 parameters (200 MB; a checkpoint is three times that) is trained for two
steps, saved, and resumed, on CPU ranks. For the main process and for the worst of the others:

- tensors: the most bytes at once of tensors that were made meanwhile, as PyTorch's operations show
  them, and how many of them at once were full matrices of parameters, not shards;
- process: by how much the resident memory of the process grew, at most (VmHWM).

On a GPU the main process's copy is in host memory, all else on the device; here both are the same
memory. So the bounds are: 1.3 times the checkpoint on the main process only, and on every rank what
training holds as well: one layer (the largest group of parameters that FSDP gathers at once), and
in a resume the shards of gradients and moments. Exits with 1 where a bound is exceeded.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from conftest import make_rows, write_tsv  # noqa: E402
from ranks import Ranks  # noqa: E402
from tiny import save_tiny  # noqa: E402
from training.settings.config import TrainConfig  # noqa: E402

TABLE = Path(__file__).with_suffix(".md")
SLACK = 32 << 20  # of a process: what gloo, pickle and the allocator keep
# The table of positions is as large as one of word embeddings usually is.
SHAPE = {"max_position_embeddings": 30_000, "hidden_size": 504, "num_hidden_layers": 13,
         "num_attention_heads": 8, "intermediate_size": 1536}  # fmt: skip


def measure(folder: Path, model: Path, world_size: int, pool: Ranks) -> tuple[list[str], bool]:
    """Lines of the table for this number of ranks, and whether all are within their bounds."""
    from jobs import memory_of_checkpoints

    config = TrainConfig(
        model=str(model), train_file=(str(write_tsv(folder / "train.tsv", make_rows(40, 1))),),
        val_fraction=0, max_length=16, max_steps=3, global_batch_size=8, batch_size=2,
        strategy="fsdp", runs_dir=str(folder / "runs"), run_name=str(world_size), save_every=1,
        cache_dir=str(folder / "cache"), timeout=300.0,
    )  # fmt: skip
    saved = pool.run(world_size, memory_of_checkpoints, config, 2)
    resumed = pool.run(world_size, memory_of_checkpoints, config)
    lines, is_within = [], True
    for what, results in (("save", saved), ("restore", resumed)):
        worst = max(results[1:], key=lambda found: found[what][2])
        for who, found in (("main", results[0]), ("others", worst)):
            tensors, full, process = found[what]
            bound = found["layer"]
            bound += 1.3 * found["checkpoint"] if who == "main" else 0
            bound += 3 * found["shards"] if what == "restore" else 0
            met = tensors <= bound and process <= bound + SLACK
            is_within = is_within and met
            megabytes = " | ".join(f"{value / 1e6:,.0f}" for value in (tensors, process, bound))
            lines.append(f"| {world_size} | {what.replace('restore', 'resume')} | {who} | {full} "
                         f"| {megabytes} | {'yes' if met else '**no**'} |")  # fmt: skip
    return lines, is_within


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true", help=f"keep the table in {TABLE.name}")
    arguments = parser.parse_args()
    head = "ranks | of a | process | full matrices | tensors, MB | process, MB | bound, MB | within"
    table, is_within = [f"| {head} |", "|---" * 8 + "|"], True
    with tempfile.TemporaryDirectory() as name:
        texts = [text for text, _ in make_rows(300, seed=3)]
        model = save_tiny(Path(name) / "model", texts, **SHAPE)
        size = (model / "model.safetensors").stat().st_size
        pool = Ranks(Path(name))
        try:
            for world_size in arguments.ranks:
                lines, met = measure(Path(name), model, world_size, pool)
                table += lines
                is_within = is_within and met
        finally:
            pool.close()
    text = f"Weights {size / 1e6:,.0f} MB, checkpoint {3 * size / 1e6:,.0f} MB.\n\n"
    text += "\n".join(table)
    print(text)
    if arguments.write:
        command = "python benchmarks/fsdp_memory.py --write"
        title = "# Memory of a checkpoint with FSDP: as measured"
        TABLE.write_text(f"{title}\n\n    {command}\n\n{text}\n", encoding="utf-8")
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
