"""Pictures. Matplotlib is imported where one is drawn: most runs draw none at the start."""

import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from training.dataset.token_store import TokenStore

MAX_CLASSES = 30  # of a data report, in table and picture
Splits = dict[str, "TokenStore"]
Sections = dict[str, list[str]]  # of the report: lines by title
CJK_FONTS = re.compile(".*Sans.*CJK|SimHei|.*YaHei|PingFang|Heiti|WenQuanYi|Hiragino Sans|Malgun")


@contextmanager
def any_text() -> Iterator[None]:
    """Figures that are drawn and saved in here show labels as they are, in any script."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    fonts = sorted(filter(CJK_FONTS.match, {font.name for font in fontManager.ttflist}))
    style: Any = {"font.family": ["DejaVu Sans", *fonts], "text.parse_math": False}  # $ is a $
    with matplotlib.rc_context(style), warnings.catch_warnings(action="ignore"):
        yield


def confusion(result: Any) -> np.ndarray:
    """Of an Evaluation: rows of true label i that were given label j, (num_labels, num_labels)."""
    from sklearn import metrics as sk

    return sk.confusion_matrix(result.truth, result.predicted(), labels=range(len(result.labels)))


def confusion_image(matrix: np.ndarray, labels: list[str]) -> np.ndarray:
    """An image, (height, width, 4) of 0 to 255, of matrix[i, j] rows of label i predicted as j."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = 3 + 0.45 * len(labels)
    with any_text():
        figure = Figure(figsize=(size, size), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel="predicted", ylabel="true")
        for i, j in np.argwhere(matrix):
            color = "white" if share[i, j] > 0.5 else "black"
            axes.text(j, i, matrix[i, j], ha="center", va="center", color=color, fontsize=8)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.array(canvas.buffer_rgba())


def draw_rows(splits: Splits, sections: Sections, path: Path) -> None:
    """Two diagrams, whose titles are those of the first two sections, and the other sections."""
    from matplotlib.figure import Figure

    classes, lengths, *titles = sections
    lines = [line for title in titles for line in ("", title, *sections[title])]
    text = "\n".join(textwrap.fill(line, 140, subsequent_indent="      ") for line in lines)
    heights = [5, 0.18 * text.count("\n")]  # inches
    train, full = splits["train"], splits["train"].values("full_length")
    order = np.argsort(train.label_counts(), kind="stable")[-MAX_CLASSES:]
    places, thickness = np.arange(len(order)), 0.8 / len(splits)
    edges = 2 ** np.arange(2, 12.5, 0.5)  # of the histogram's bins, in tokens
    with any_text():
        figure = Figure(figsize=(12, sum(heights)), layout="constrained")
        left, right, below = figure.subplot_mosaic("AB;CC", height_ratios=heights).values()
        for i, (name, store) in enumerate(splits.items()):
            share = 100 * store.label_counts()[order] / len(store)
            left.barh(places - i * thickness, share, thickness, label=name)
            tokens = np.clip(store.values("full_length"), edges[0], edges[-1])
            share = 100 * np.histogram(tokens, edges)[0] / len(store)
            right.stairs(share, edges, label=f"{name}, {len(store):,} rows", lw=2)
        left.set_yticks(places - 0.4 + thickness / 2, [train.labels[i][:30] for i in order])
        left.set(title=classes, xlabel="% of the rows")
        left.legend()
        right.set_xscale("log", base=2)
        right.set_xticks(edges[2::2], [f"{n:.0f}\n{(full > n).mean():.1%}" for n in edges[2::2]])
        tokens_label = "tokens; below: share of the train rows with more"
        right.set(title=lengths, xlabel=tokens_label, ylabel="% of the rows")
        right.legend()
        below.axis("off")
        below.text(0, 1, text, va="top", fontsize=9)
        figure.savefig(path, dpi=110)
