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
from typing import Any, TextIO

from training.settings.errors import UserError

CHUNK = 4096  # rows held at a time; within them, texts of similar length share a batch
TextAndPair = tuple[str, str | None]
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
    # Only now the slow imports: the checks above answer at once.
    classify = Classifier(folder, arguments.batch_size)
    texts = arguments.texts or sys.stdin
    results = classify(classify.read(arguments) if arguments.input else texts_of(texts))
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
        truncate = self.settings.get("truncate", "head")
        self.encode = Encoder(self.tokenizer, self.tokenizer.model_max_length, truncate)
        self.multi_label = self.model.config.problem_type == "multi_label_classification"

    def read(self, arguments: argparse.Namespace) -> Iterator[TextAndPair]:
        """The texts of --input, in its order, as many as its rows unless bad ones are skipped."""
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

    def __call__(self, rows: Iterator[TextAndPair]) -> Iterator[Prediction]:
        names = self.model.config.id2label
        while chunk := list(islice(rows, CHUNK)):
            for (text, _), row in zip(chunk, self.probabilities(chunk), strict=True):
                best = (row >= 0.5).nonzero()[0] if self.multi_label else [row.argmax()]
                labels = ", ".join(names[int(i)] for i in best)
                yield text, labels, ", ".join(f"{row[i]:.4f}" for i in best)

    def probabilities(self, rows: list[TextAndPair]) -> Any:
        """(rows, labels)"""
        import numpy as np
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from training.step.evaluation import probabilities

        texts, pairs = zip(*rows, strict=True)
        has_pairs = any(pair is not None for pair in pairs)
        encoded = self.encode(texts, [pair or "" for pair in pairs] if has_pairs else None)
        names = {"input_ids", "attention_mask", *self.tokenizer.model_input_names}
        order = sorted(range(len(rows)), key=lambda i: len(encoded.ids[i]))
        logits = np.empty((len(rows), self.model.config.num_labels), np.float32)
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            ids = [torch.tensor(encoded.ids[i]) for i in batch]
            types = [torch.arange(len(encoded.ids[i])) >= encoded.first[i] for i in batch]
            inputs = {
                "input_ids": pad_sequence(ids, True, self.tokenizer.pad_token_id),
                "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
                "token_type_ids": pad_sequence(types, True).long(),
            }
            known = {name: inputs[name].to(self.device) for name in inputs if name in names}
            with torch.no_grad():
                logits[batch] = self.model(**known).logits.float().cpu().numpy()
        return probabilities(logits, self.multi_label)


def texts_of(lines: Iterable[str]) -> Iterator[TextAndPair]:
    """Texts as rows. A blank one is an error, so that the output has the lines of the input."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"text {number} is blank")
        yield line.rstrip("\r\n"), None


def write(results: Iterable[Prediction], file: TextIO, suffix: str, header: bool) -> int:
    """Write predictions as CSV, TSV or JSONL; return how many.

    TSV has no quotes, so tabs and line ends in a text become spaces.
    """
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
