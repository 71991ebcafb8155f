"""Label texts with a trained model.

    python predict.py --model runs/NAME/best "a text" "another text"
    python predict.py --model runs/NAME/best < texts.txt            # a text a line
    python predict.py --model runs/NAME/best --input rows.csv --output labels.csv

Texts are prepared exactly as in training. A label comes with its probability; a multi-label model
gives all labels with a probability of at least a half.
"""

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from training.settings.errors import UserError

CHUNK = 4096  # rows held at a time; within them, texts of similar length share a batch


class Prediction(NamedTuple):
    text: str
    label: str  # with a multi-label model all labels, separated by commas
    probability: str


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="default: one per line on standard input"
    )
    parser.add_argument("--model", required=True, type=Path, help="a folder such as runs/NAME/best")
    parser.add_argument("--input", type=Path, help="CSV, TSV, JSONL, Parquet, or .txt")
    parser.add_argument("--output", type=Path, help=".csv, .tsv or .jsonl (default: the screen)")
    parser.add_argument("--text-column", nargs="+", help="default: as in training")
    parser.add_argument("--text-pair-column", help="default: as in training")
    parser.add_argument("--encoding", default="utf-8", help="of the input (default: utf-8)")
    parser.add_argument("--delimiter", help="between columns (default: by suffix)")
    parser.add_argument(
        "--no-header", dest="header", action="store_false", help="columns are numbers"
    )
    parser.add_argument("--on-bad-rows", choices=("error", "skip"), default="error")
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    if not (arguments.model / "config.json").exists():
        raise UserError(f"{arguments.model} is not a model folder; give --model runs/NAME/best")
    if arguments.output and arguments.output.suffix not in (".csv", ".tsv", ".jsonl"):
        raise UserError(f"--output {arguments.output} must end in .csv, .tsv or .jsonl")
    if arguments.output and not arguments.output.parent.is_dir():
        raise UserError(
            f"--output {arguments.output}: there is no folder {arguments.output.parent}"
        )
    if arguments.input and arguments.texts:
        raise UserError("give texts or --input, not both")
    # Only now the slow imports: the checks above answer at once.
    classify = Classifier(arguments.model, arguments.batch_size)
    texts = arguments.texts or sys.stdin
    rows = classify.read(arguments) if arguments.input else texts_of(texts)
    results = itertools.chain.from_iterable(map(classify, chunks(rows)))
    if arguments.output is None:
        write(results, sys.stdout, ".tsv", header=False)
        return
    partial = arguments.output.with_name(f".{arguments.output.name}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            count = write(results, file, arguments.output.suffix, header=True)
        partial.replace(arguments.output)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{count} rows to {arguments.output}", file=sys.stderr)


class Classifier:
    """A trained model with the preprocessing it was trained with."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

        from training.dataset.tokenizer import Encoder

        logging.disable_progress_bar()
        self.batch_size = batch_size
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
        self.model.to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.settings: dict[str, Any] = getattr(self.model.config, "preprocessing", {})
        self.encode = Encoder(
            self.tokenizer, self.tokenizer.model_max_length, self.settings.get("truncate", "head")
        )
        self.multi_label = self.model.config.problem_type == "multi_label_classification"

    def read(self, arguments: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
        """The texts of --input, in its order. A row without a text is an error, so that the output
        has the rows of the input."""
        from training.dataset.files import expand_files
        from training.dataset.readers import read_rows
        from training.dataset.rows import ReadOptions, ReadReport
        from training.dataset.tokenizer import separator_of

        options = ReadOptions(
            text_columns=tuple(arguments.text_column or self.settings.get("text_column", ["text"])),
            text_pair_column=arguments.text_pair_column or self.settings.get("text_pair_column"),
            label_column=None,
            text_separator=separator_of(self.tokenizer),
            encoding=arguments.encoding,
            delimiter=arguments.delimiter,
            header=arguments.header,
            on_bad_rows=arguments.on_bad_rows,
        )
        for row in read_rows(expand_files([arguments.input]), options, ReadReport()):
            yield row.text, row.pair

    def __call__(self, rows: list[tuple[str, str | None]]) -> list[Prediction]:
        probabilities = self.probabilities([r[0] for r in rows], [r[1] for r in rows])
        names = self.model.config.id2label
        predictions = []
        for (text, _), row in zip(rows, probabilities, strict=True):
            best = (row >= 0.5).nonzero()[0] if self.multi_label else [row.argmax()]
            labels = ", ".join(names[int(i)] for i in best)
            predictions.append(Prediction(text, labels, ", ".join(f"{row[i]:.4f}" for i in best)))
        return predictions

    def probabilities(self, texts: list[str], pairs: list[str | None]) -> Any:
        """(rows, labels) in the order of `texts`."""
        import numpy as np
        import torch

        from training.step.evaluation import probabilities

        types = {"token_type_ids"} & set(self.tokenizer.model_input_names)
        paired = [pair or "" for pair in pairs] if any(p is not None for p in pairs) else None
        encoded = self.encode(texts, paired)
        order = sorted(range(len(texts)), key=lambda i: len(encoded.ids[i]))
        logits = np.empty((len(texts), self.model.config.num_labels), np.float32)
        for begin in range(0, len(order), self.batch_size):
            rows = order[begin : begin + self.batch_size]
            length = max(len(encoded.ids[i]) for i in rows)
            inputs = torch.full((3, len(rows), length), 0)  # ids, mask, token types
            inputs[0] = self.tokenizer.pad_token_id
            for place, i in enumerate(rows):
                ids = torch.tensor(encoded.ids[i])
                inputs[0, place, : len(ids)] = ids
                inputs[1, place, : len(ids)] = 1
                inputs[2, place, encoded.first[i] : len(ids)] = 1
            names = ["input_ids", "attention_mask", *types]
            with torch.no_grad():
                batch = dict(zip(names, inputs.to(self.device), strict=False))
                logits[rows] = self.model(**batch).logits.float().cpu().numpy()
        return probabilities(logits, self.multi_label)


def texts_of(lines: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Texts as rows. A blank one is an error, so that the output has the lines of the input."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"text {number} is blank")
        yield line.rstrip("\r\n"), None


def chunks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


def write(results: Iterable[Prediction], file: TextIO, suffix: str, header: bool) -> int:
    """Write predictions as CSV, TSV or JSONL; return how many.

    TSV has no quotes, so tabs and line ends in a text become spaces.
    """
    count = 0
    table = csv.writer(file)
    if header and suffix != ".jsonl":
        delimiter = "\t" if suffix == ".tsv" else ","
        file.write(delimiter.join(Prediction._fields) + "\n")
    for row in results:
        count += 1
        if suffix == ".jsonl":
            numbers = json.loads(f"[{row.probability}]")
            probability = numbers[0] if len(numbers) == 1 else numbers
            file.write(json.dumps(row._asdict() | {"probability": probability}, ensure_ascii=False))
            file.write("\n")
        elif suffix == ".csv":
            table.writerow(row)
        else:
            text = " ".join(row.text.split("\t")).replace("\n", " ").replace("\r", " ")
            file.write(f"{text}\t{row.label}\t{row.probability}\n")
    return count


if __name__ == "__main__":
    try:
        main(parse())
    except (UserError, OSError) as error:
        sys.exit(f"predict.py: {error}")
