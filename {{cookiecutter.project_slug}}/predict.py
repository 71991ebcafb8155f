"""Label texts with a trained model. They are prepared exactly as in training.

    python predict.py --model runs/NAME/best "a text" "another text"
    python predict.py --model runs/NAME/best < texts.txt            # a text a line
    python predict.py --model runs/NAME/best --input rows.csv --output labels.csv

A multi-label model gives all labels with a probability of at least a half.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from training.settings.errors import UserError

CHUNK = 4096  # rows held at a time; within them, texts of similar length share a batch
TextAndPair = tuple[str | tuple[str, ...], str | None]
Prediction = tuple[str, str, str]  # text; label, or all of a multi-label model; probability of each


def parse() -> argparse.Namespace:
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="default: one per line on standard input")
    add("--model", required=True, type=Path, help="a folder such as runs/NAME/best")
    add("--input", type=Path, help="CSV, TSV, JSONL, Parquet, or .txt")
    add("--output", type=Path, help=".csv, .tsv or .jsonl (default: the screen)")
    add("--text-column", nargs="+", help="default: as in training")
    add("--text-pair-column", help="default: as in training")
    add("--encoding", default="utf-8", help="of the input (default: utf-8)")
    add("--delimiter", help="between columns (default: by suffix)")
    add("--no-header", dest="header", action="store_false", help="columns are numbers")
    add("--on-bad-rows", choices=("error", "skip"), default="error")
    add("--batch-size", type=int, default=32)
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    folder, output = arguments.model, arguments.output
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a model folder; give --model runs/NAME/best")
    if output and output.suffix not in (".csv", ".tsv", ".jsonl"):
        raise UserError(f"--output {output} must end in .csv, .tsv or .jsonl")
    if output and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    if arguments.input and arguments.texts:
        raise UserError("give texts or --input, not both")
    results = classify(arguments)
    if output is None:
        write(results, sys.stdout, ".tsv", header=False)
        return
    partial = output.with_name(f".{output.name}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            count = write(results, file, output.suffix, header=True)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{count} rows to {output}", file=sys.stderr)


def classify(arguments: argparse.Namespace) -> Iterator[Prediction]:
    """Predictions in the order of the texts."""
    # Not at the top, so that `main` answers a mistake at once.
    import numpy as np
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    from training.dataset.token_store import collate
    from training.dataset.tokenizer import Encoder
    from training.step.evaluation import probabilities

    logging.disable_progress_bar()
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype="auto")
    model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    has_types = "token_type_ids" in tokenizer.model_input_names
    settings = getattr(model.config, "preprocessing", {})
    encode = Encoder(tokenizer, tokenizer.model_max_length, settings.get("truncate", "head"))
    multi_label = model.config.problem_type == "multi_label_classification"
    rows = texts_of(arguments.texts or sys.stdin)
    if arguments.input:
        rows = read(arguments, settings)
    while chunk := list(islice(rows, CHUNK)):
        texts, pairs = zip(*chunk, strict=True)
        has_pairs = any(pair is not None for pair in pairs)
        encoded = encode(texts, [pair or "" for pair in pairs] if has_pairs else None)
        order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
        logits = np.empty((len(chunk), model.config.num_labels), np.float32)
        for begin in range(0, len(order), arguments.batch_size):
            batch = order[begin : begin + arguments.batch_size]
            ids, first = [encoded.ids[i] for i in batch], [encoded.first[i] for i in batch]
            inputs = collate(ids, first, tokenizer.pad_token_id, has_types and has_pairs)
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            with torch.no_grad():
                logits[batch] = model(**inputs).logits.float().cpu().numpy()
        for text, row in zip(texts, probabilities(logits, multi_label), strict=True):
            best = (row >= 0.5).nonzero()[0] if multi_label else [row.argmax()]
            labels = ", ".join(model.config.id2label[int(i)] for i in best)
            shown = "\n".join(text) if isinstance(text, tuple) else text
            yield shown, labels, ", ".join(f"{row[i]:.4f}" for i in best)


def read(arguments: argparse.Namespace, trained: dict) -> Iterator[TextAndPair]:
    """The texts of --input, in its order. `trained`: the settings of the training."""
    from training.dataset.files import expand_files
    from training.dataset.readers import FileRows
    from training.dataset.rows import ReadOptions, ReadReport, good_rows

    options = ReadOptions(
        text_columns=tuple(arguments.text_column or trained.get("text_column", ["text"])),
        text_pair_column=arguments.text_pair_column or trained.get("text_pair_column"),
        label_column=None,
        encoding=arguments.encoding,
        delimiter=arguments.delimiter,
        header=arguments.header,
    )
    items = FileRows(expand_files([arguments.input]), options)
    for row in good_rows(items, arguments.on_bad_rows, ReadReport()):
        yield row.text, row.pair


def texts_of(lines: Iterable[str]) -> Iterator[TextAndPair]:
    """Texts as rows. A blank one is an error, so that the output has the lines of the input."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"text {number} is blank")
        yield line.rstrip("\r\n"), None


def write(results: Iterable[Prediction], file: TextIO, suffix: str, header: bool) -> int:
    """Return how many. TSV has no quotes, so tabs and line ends in a text become spaces."""
    if header and suffix != ".jsonl":
        delimiter = "\t" if suffix == ".tsv" else ","
        file.write(delimiter.join(["text", "label", "probability"]) + "\n")
    count, table = 0, csv.writer(file)
    for text, label, probability in results:
        count += 1
        if suffix == ".csv":
            table.writerow([text, label, probability])
        elif suffix == ".tsv":
            file.write(re.sub(r"[\t\r\n]", " ", text) + f"\t{label}\t{probability}\n")
        else:
            numbers = json.loads(f"[{probability}]")
            number = numbers[0] if len(numbers) == 1 else numbers
            line = {"text": text, "label": label, "probability": number}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return count


if __name__ == "__main__":
    try:
        main(parse())
    except (UserError, OSError) as error:
        sys.exit(f"predict.py: {error}")
