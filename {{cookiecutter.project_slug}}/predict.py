"""Label texts with a trained model. They are prepared exactly as in training.

    python predict.py --model runs/NAME/best "a text" "another text"
    python predict.py --model runs/NAME/best < texts.txt            # a text a line
    python predict.py --model runs/NAME/best --input rows.csv --output labels.csv
    python predict.py --model runs/NAME/best --split test           # rows of data.py

A multi-label model gives all labels with a probability of at least a half.
"""

import argparse
import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from training.settings.errors import UserError
from training.settings.versions import check_versions

CHUNK = 4096  # rows held at a time; within them, texts of similar length share a batch


class Prediction(NamedTuple):
    text: str
    label: str = ""  # all labels of a multi-label model
    probability: str = ""  # of each of them


def parse() -> argparse.Namespace:
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="default: one per line on standard input")
    add("--model", required=True, type=Path, help="a folder such as runs/NAME/best")
    add("--input", type=Path, help="CSV, TSV, JSONL, Parquet, or .txt")
    add("--split", help="train, val or test: the rows that data.py gives for it")
    add("--output", type=Path, help=".csv, .tsv or .jsonl (default: the screen)")
    add("--text-column", nargs="+", help="default: as in training")
    add("--text-pair-column", help="default: as in training")
    add("--encoding", default="utf-8", help="of the input (default: utf-8)")
    add("--delimiter", help="between columns (default: by suffix)")
    add("--no-header", dest="header", action="store_false", help="columns are numbers")
    add("--on-bad-rows", choices=("error", "skip"), default="error",
        help="skip: a row that cannot be read gets an empty label (default: error)")  # fmt: skip
    add("--trust-remote-code", action="store_true", help="run Python code of the model's folder")
    add("--batch-size", type=int, default=32)
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    check_versions("predict.py")
    output = arguments.output
    if output and output.suffix not in (".csv", ".tsv", ".jsonl"):
        raise UserError(f"--output {output} must end in .csv, .tsv or .jsonl")
    if output and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    if sum(map(bool, (arguments.input, arguments.texts, arguments.split))) > 1:
        raise UserError("give one of texts, --input and --split")
    results = classify(arguments)
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # any text, whatever the terminal has
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
    from training.dataset.rows import (
        BadRow,
        Row,
    )  # not at the top: `main` answers a mistake at once

    classifier = Classifier(arguments.model, arguments.batch_size, arguments.trust_remote_code)
    labels, multi_label = classifier.labels, classifier.config.multi_label
    items = (item for item in rows_of(arguments, classifier.config) if type(item) in (Row, BadRow))
    unreadable = 0
    while chunk := list(islice(items, CHUNK)):
        probabilities = iter(classifier.probabilities([row for row in chunk if type(row) is Row]))
        for item in chunk:
            values = next(probabilities) if type(item) is Row else None
            if values is None or math.isnan(values[0]):  # NaN: nothing is left of the text
                reason = "no tokens in the text" if values is not None else item.reason
                place = f"{item.file}:{item.line}" if item.file else f"row {item.line}"
                if arguments.on_bad_rows == "error":
                    advice = "--on-bad-rows skip gives such rows an empty label"
                    raise UserError(f"{place} {reason}; {advice}")
                unreadable += 1
                yield Prediction(item.text if values is not None else item.content)
                continue
            best = (values >= 0.5).nonzero()[0] if multi_label else [values.argmax()]
            names = ", ".join(labels[int(i)] for i in best)
            shown = item.text if isinstance(item.text, str) else "\n".join(item.text)
            yield Prediction(shown, names, ", ".join(f"{values[i]:.4f}" for i in best))
    if unreadable:
        print(f"rows that cannot be read, with an empty label: {unreadable}", file=sys.stderr)


class Classifier:
    """A trained model. Errors: UserError if `folder` is not a run's, or fits another model.py."""

    def __init__(self, folder: Path, batch_size: int = 32, trust_remote_code: bool = False) -> None:
        from transformers import logging

        from model import build_model
        from training.checkpoint.model_folder import load_model
        from training.dataset.tokenizer import Encoder
        from training.distributed.ranks import find_accelerator

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        loaded = load_model(folder, build_model, trust_remote_code)
        self.labels, self.config, self.tokenizer = loaded.labels, loaded.config, loaded.tokenizer
        self.batch_size = batch_size
        self.device = find_accelerator() or "cpu"
        self.model = loaded.model.to(self.device).eval()
        self.encode = Encoder(self.tokenizer, self.config.max_length, self.config.truncate)

    def probabilities(self, rows: list[Any]) -> Any:
        """(rows, num_labels) for Rows; NaN for a row whose text has no tokens."""
        import numpy as np
        import torch

        from training.step.evaluation import probabilities
        from training.step.loss import check_forward_arguments, logits_of

        result = np.full((len(rows), len(self.labels)), np.nan)
        if not rows:
            return result
        pairs = None if rows[0].pair is None else [row.pair or "" for row in rows]
        encoded = self.encode([row.text for row in rows], pairs)
        order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
        order = order[np.array(encoded.has_tokens)[order]]
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            inputs = self._inputs([rows[i] for i in batch], encoded, batch)
            if begin == 0:  # all batches have the same names
                check_forward_arguments(self.model, inputs)
            with torch.no_grad():
                output = self.model(**{name: t.to(self.device) for name, t in inputs.items()})
            logits = logits_of(output).to("cpu", torch.float64).numpy()
            result[batch] = probabilities(logits, self.config.multi_label)
        return result

    def _inputs(self, rows: list[Any], encoded: Any, batch: Any) -> dict[str, Any]:
        """The model's inputs for rows that have these places in `encoded`."""
        import numpy as np
        import torch

        from training.dataset.token_store import collate

        ids, first = [encoded.ids[i] for i in batch], [encoded.first[i] for i in batch]
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        types = has_types and rows[0].pair is not None
        inputs = collate(ids, first, self.tokenizer.pad_token_id, types)
        for name in rows[0].inputs or {}:
            values = np.array([row.inputs[name] for row in rows], np.float32)
            inputs[name] = torch.from_numpy(values)
        return inputs


def rows_of(arguments: argparse.Namespace, config: Any) -> Iterable[Any]:
    """The rows to label, and a BadRow for each that cannot be read. `config`: of the training."""
    if arguments.split:
        import data

        return data.rows(arguments.split, config) or ()
    if not arguments.input:
        return texts_of(arguments.texts or sys.stdin)
    from training.dataset.files import expand_files
    from training.dataset.readers import FileRows
    from training.dataset.rows import ReadOptions

    options = ReadOptions(
        text_columns=tuple(arguments.text_column or config.text_column),
        text_pair_column=arguments.text_pair_column or config.text_pair_column,
        label_column=None,
        encoding=arguments.encoding,
        delimiter=arguments.delimiter,
        header=arguments.header,
    )
    return FileRows(expand_files([arguments.input]), options)


def texts_of(lines: Iterable[str]) -> Iterator[Any]:
    """Texts as rows."""
    from training.dataset.rows import BadRow, Row

    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        yield Row(text, line=number) if text.strip() else BadRow("", number, "is blank", text)


def write(results: Iterable[Prediction], file: TextIO, suffix: str, header: bool) -> int:
    """Return how many. TSV has no quotes, so tabs and line ends in a text become spaces."""
    if header and suffix != ".jsonl":
        delimiter = "\t" if suffix == ".tsv" else ","
        file.write(delimiter.join(Prediction._fields) + "\n")
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
