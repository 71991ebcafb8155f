"""The rows that data.py gives: drawn, checked, and known by their content.

Whatever they depend on is in `Source.key`, of which the name of a token store is made.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from training.dataset.rows import ROW, ReadReport, Row, good_rows
from training.distributed import watchdog
from training.distributed.ranks import on_local_main, on_main
from training.settings.config import TrainConfig
from training.settings.errors import UserError

TENSORS = ("input_ids", "attention_mask", "token_type_ids", "labels")  # names that are taken
HEARTBEAT_ROWS = 1000


class Source:
    """The rows of a module that has `rows(split, config)`, under these settings.

    An iterable of rows with a method `fingerprint` says itself when its content has changed. Other
    rows are drawn once by the main process, which hashes them; whoever draws them again must get
    the same ones.
    """

    def __init__(self, module: ModuleType, config: TrainConfig):
        self.module, self.config = module, config
        self._contents: dict[str, str] = {}

    def content(self, split: str) -> str:
        """A text that changes when the rows of the split do; "" if there are none."""
        if split not in self._contents:
            content = on_main(partial(self._hash, split))
            if content is None:
                content = on_local_main(partial(self._fingerprint, split))
            self._contents[split] = content
        return self._contents[split]

    def key(self, split: str) -> list[Any]:
        """All that the split's rows depend on: content, code, and settings, paths by content."""
        code = code_of(Path(str(self.module.__file__)))
        code |= {f.name: f.read_text("utf-8") for f in sorted(Path(__file__).parent.glob("*.py"))}
        return [split, self.content(split), code, self.config.row_settings()]

    def draw(self, split: str, report: ReadReport) -> Iterator[Row]:
        """The split's rows, which `report` counts. Errors: UserError for rows that cannot be used,
        and if they are not those whose content is known."""
        content, given = self.content(split), self._given(split)
        if not content:
            raise UserError(f"data.py: rows({split!r}, config) gives no rows")
        if hasattr(given, "fingerprint"):
            yield from self._checked(split, given, report)
            return
        digest = hashlib.sha256()
        yield from _hashed(self._checked(split, given, report), digest)
        if digest.hexdigest() != content:
            problem = f"data.py: rows({split!r}, config) gives other rows when it is called again"
            advice = "sort what a query returns (ORDER BY), and seed what is chosen at random"
            raise UserError(f"{problem}; {advice}")

    def _given(self, split: str) -> Any:
        """The iterable that data.py returns."""
        rows, what = getattr(self.module, "rows", None), f"data.py: rows({split!r}, config)"
        if not callable(rows):
            raise UserError("data.py has no function rows(split, config)")
        try:
            inspect.signature(rows).bind(split, self.config)
        except TypeError as error:
            raise UserError(f"{what} cannot be called: {error}") from None
        given = rows(split, self.config)
        if given is not None and not isinstance(given, Iterable):
            raise UserError(f"{what} returns {given!r:.100}; it must yield {ROW}")
        return () if given is None else given

    def _checked(self, split: str, given: Iterable[Any], report: ReadReport) -> Iterator[Row]:
        rows = good_rows(given, self.config.on_bad_rows, report)
        return checked(rows, f"data.py: rows({split!r}, config)", self.config.multi_label)

    def _hash(self, split: str) -> str | None:
        """A hash of the split's rows; "" if there are none; None if they have a fingerprint."""
        given, digest, report = self._given(split), hashlib.sha256(), ReadReport()
        if hasattr(given, "fingerprint"):
            return None
        for _ in _hashed(self._checked(split, given, report), digest):
            pass
        return digest.hexdigest() if report.rows else ""

    def _fingerprint(self, split: str) -> str:
        """The rows' own fingerprint; "" if there are none. Files of machines may differ."""
        given = self._given(split)
        return "" if next(iter(given), None) is None else f"fingerprint {given.fingerprint()}"


def _hashed(rows: Iterable[Row], digest: Any) -> Iterator[Row]:
    """Yield the rows, and feed them to `digest`."""
    for number, row in enumerate(rows):
        inputs = {name: array.tolist() for name, array in (row.inputs or {}).items()}
        digest.update(repr((*row[:3], inputs)).encode("utf-8", "surrogatepass"))
        if number % HEARTBEAT_ROWS == 0:
            watchdog.heartbeat()
        yield row


def checked(rows: Iterable[Row], where: str, multi_label: bool) -> Iterator[Row]:
    """Yield the rows, their inputs as float32 arrays. Errors: UserError for one with values of a
    wrong type, or of another kind than the first one."""
    first: Any = None
    usual: Any = None  # the types of a row's first three fields that need no further look
    for number, row in enumerate(rows, 1):
        if row[5] is None and (type(row[0]), type(row[1]), type(row[2])) == usual:
            yield row
            continue
        try:
            row, kind = _checked_row(row, multi_label)
            first = first or kind
            if kind != first:
                raise ValueError(
                    f"it has {describe_kind(kind)}; the first row has {describe_kind(first)}"
                )
        except ValueError as error:
            place = f" ({row.file}:{row.line})" if row.file else ""
            raise UserError(
                f"{where} gives for row {number}{place} {row!r:.200}: {error}"
            ) from None
        if type(row.text) is str and type(row.label) is str and row.inputs is None:
            usual = str, type(row.pair), str
        yield row


def _checked_row(row: Row, multi_label: bool) -> tuple[Row, Any]:
    """The row, and its number of texts, whether it is a pair, and the lengths of its inputs."""
    texts = row.text if type(row.text) is tuple else (row.text,)
    if not texts or not all(type(text) is str for text in texts):
        raise ValueError("the text must be a str, or a tuple of them")
    if type(row.pair) not in (str, type(None)):
        raise ValueError("the pair, a second text, must be a str or None")
    if not multi_label and type(row.label) is tuple:
        raise ValueError("the label must be a str; a tuple of labels needs --multi-label")
    if not multi_label and (type(row.label) is not str or not row.label):
        raise ValueError("the label must be a str that is not empty: Row(text, label=...)")
    names = row.label if type(row.label) is tuple else (None,)
    if multi_label and not all(type(name) is str and name for name in names):
        raise ValueError("the label must be a tuple of str (with --multi-label)")
    inputs, sizes = None, {}
    if row.inputs is not None:
        if not isinstance(row.inputs, Mapping):
            raise ValueError("inputs must be a dict of numbers, or of lists of numbers, by name")
        inputs = {name: _numbers(name, value) for name, value in row.inputs.items()}
        sizes = {name: array.size if array.ndim else 0 for name, array in sorted(inputs.items())}
    number = len(texts) if type(row.text) is tuple else 0
    return row._replace(inputs=inputs), (number, row.pair is not None, sizes)


def _numbers(name: Any, value: Any) -> np.ndarray:
    """One of a row's inputs: () or (k,) float32."""
    if not (isinstance(name, str) and name.isidentifier()) or name in TENSORS:
        taken = ", ".join(TENSORS)
        raise ValueError(f"an input is named as a parameter of forward, not {name!r} or {taken}")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0)
    if array.dtype.kind not in "biuf" or array.ndim > 1 or not array.size:
        raise ValueError(f"inputs[{name!r}] must be a number or a list of numbers")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"inputs[{name!r}] is not finite (in float32); fill it in")
    return array


def describe_kind(kind: Any) -> str:
    """The kind of a row in words."""
    number, is_pair, sizes = kind
    text = f"a tuple of {number} texts" if number else "a text"
    inputs = ", ".join(f"{name} of length {n}" if n else name for name, n in sizes.items())
    return f"{text}, {'a' if is_pair else 'no'} pair, and inputs: {inputs or 'none'}"


# -- the code that rows depend on -----------------------------------------------------------------


def code_of(file: Path) -> dict[str, str]:
    """The code of a module and of all modules of its project that it imports, also inside functions
    and by a detour: {path: code}. The machinery in training/ is left out."""
    file = file.resolve()
    root, found, waiting = file.parent, {}, [file]
    while waiting:
        file = waiting.pop()
        name, code = file.relative_to(root).as_posix(), file.read_bytes()
        found[name] = code.decode("utf-8", "replace")
        tree = ast.parse(code, str(file))
        tree.body = [node for node in tree.body if not _is_script(node)]
        for other in _imported_files(tree, file, root):
            if not other.is_file() or root not in other.parents:
                continue
            inside = [parent for parent in other.parents if root in parent.parents]
            foreign = any((parent / "pyvenv.cfg").exists() for parent in inside)
            name = other.relative_to(root).as_posix()
            if not foreign and not name.startswith("training/") and name not in found:
                waiting.append(other)
    return found


def _is_script(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__"`: the rows do not depend on that."""
    return isinstance(node, ast.If) and "__main__" in ast.dump(node.test)


def _imported_files(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """The files that the imports of `file` would name in its project, whether they exist or not."""
    for node in ast.walk(tree):
        names, base = [], root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            names = [prefix + alias.name for alias in node.names]
            base = file.parents[node.level - 1] if node.level else root
        for name in names:
            folder = base
            yield folder / "__init__.py"
            for part in name.split("."):
                yield folder / f"{part}.py"
                folder /= part
                yield folder / "__init__.py"
