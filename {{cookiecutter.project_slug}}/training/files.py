"""Find, open and decode data files: globs, compression, encodings, and plain words for what fails.

Nothing is guessed: a wrong byte is an error, and a likely encoding is only ever suggested.
"""

import bz2
import codecs
import difflib
import glob
import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from encodings.aliases import aliases
from itertools import chain
from pathlib import Path
from typing import Any

from training.config import UserError, near

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", *JSON_SUFFIXES)
ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
CHUNK = 1 << 16
BOMS = (  # utf-32-le first: its mark begins with that of utf-16-le
    (codecs.BOM_UTF32_LE, "utf-32", "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32", "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16", "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16", "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8", "utf-8-sig"),
)
MAGIC = (
    (b"\x1f\x8b", "gzip data: end its name in .gz"),
    (b"BZh91AY&SY", "bzip2 data: end its name in .bz2"),
    (b"\xfd7zXZ\0", "xz data: end its name in .xz"),
    (b"PK\x03\x04", "a zip archive or an Excel workbook: save it as CSV"),
)


def expand_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Files for paths and globs (`**` too), in the order given, each glob sorted by name.

    Raises FileNotFoundError for a path or glob without a file, UserError for a folder or for a
    file named twice.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"{pattern} is a folder; name its files, for example '{path}/*.csv'")
        if path.exists():  # its name may hold brackets
            files.append(path)
            continue
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not any(file.is_file() for file in found):
            raise FileNotFoundError(_not_found(pattern, path))
        files += [file for file in found if file.is_file()]
    for file, count in Counter(files).items():
        if count > 1:
            raise UserError(f"{file} is named {count} times, so its rows would count {count} times")
    return files


def _not_found(pattern: str | Path, path: Path) -> str:
    folder = path.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    if not folder.is_dir():
        return f"no file {str(pattern)!r}: there is no folder {str(folder)!r}"
    names = sorted(entry.name for entry in folder.iterdir())
    similar = difflib.get_close_matches(path.name, names, 3, cutoff=0.5) or names[:5]
    return f"no file {str(pattern)!r}; {str(folder)!r} has {', '.join(similar) or 'no files'}"


def format_of(path: Path) -> str:
    """The suffix that says how to read a file, without that of the compression."""
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES + ARROW_SUFFIXES:
        return suffix
    inner = Path(path.stem).suffix.lower()
    if suffix in COMPRESSED and inner in TEXT_SUFFIXES:
        return inner
    raise UserError(
        f"{path}: unknown kind of file; supported are {' '.join(TEXT_SUFFIXES)}, each also with "
        f"{' '.join(COMPRESSED)} after it, and {' '.join(ARROW_SUFFIXES)}"
    )


def _open_bytes(path: Path) -> Any:
    return COMPRESSED.get(path.suffix.lower(), lambda path: path.open("rb"))(path)


@contextmanager
def open_lines(path: Path, encoding: str) -> Iterator[Iterator[str]]:
    r"""Lines of a text file, decompressed and decoded, without a byte order mark.

    A line ends at "\n" alone and keeps it: U+2028, U+0085 or a lone "\r" is content, which
    str.splitlines would cut. Whatever goes wrong while reading becomes a UserError.
    """
    try:
        try:
            with _open_bytes(path) as raw:
                _check_head(raw.read(CHUNK), path, encoding)
                raw.seek(0)
                text = io.TextIOWrapper(raw, encoding, newline="\n")
                first = text.readline().removeprefix("\ufeff")
                yield chain([first] if first else [], text)
        except UnicodeDecodeError:
            raise _decode_error(path, encoding) from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        what = f"broken {path.suffix} file" if path.suffix.lower() in COMPRESSED else "unreadable"
        raise UserError(f"{path}: {what}: {getattr(error, 'strerror', 0) or error}") from None


# -- encodings -----------------------------------------------------------------------------------


def _codec(encoding: str) -> str:
    """Python's name of an encoding. Errors: UserError for what no text file is written in."""
    try:
        name = codecs.lookup(encoding).name
        "".encode(encoding)  # refuses what is not for text, such as base64
    except (LookupError, ValueError):
        hint = near(encoding, sorted({*aliases, *aliases.values()})) or ", try gb18030 or latin-1"
        raise UserError(f"--encoding {encoding!r} is not known{hint}") from None
    if name in ("idna", "punycode", "utf-7", "unicode-escape", "raw-unicode-escape"):
        raise UserError(f"--encoding {encoding!r} is not one of text files, try utf-8")
    return name


def _check_head(head: bytes, path: Path, encoding: str) -> None:
    """Refuse what would decode to something wrong without an error."""
    codec = _codec(encoding)
    likely = None
    for magic, what in MAGIC:
        if head.startswith(magic):
            raise UserError(f"{path}: this is {what}")
    marks = next((names for bom, *names in BOMS if head.startswith(bom)), None)
    wide = codec.startswith(("utf-16", "utf-32"))
    nuls = sorted((head[:64:2].count(0), head[1:64:2].count(0)))
    if marks:
        likely = marks[0] if codec not in marks else None
    elif codec in ("utf-16", "utf-32") or (
        not wide and nuls[0] == 0 and nuls[1] * 4 >= len(head[:64]) > 4
    ):
        likely = guess_encoding(head) or "utf-16-le"  # where the mark is missing, or utf-16 unsaid
    elif codec != "utf-8":
        text = _decode(head, "utf-8")
        # No other encoding looks like ten characters of UTF-8 by accident; utf-16 text has NULs.
        if "\0" not in text and (sum(map("\x7f".__lt__, text)) >= 10 or (wide and text)):
            likely = "utf-8"
    if likely:
        raise UserError(f"{path}: this is {likely}, not {encoding}: pass --encoding {likely}")


def _decode(data: bytes, encoding: str) -> str:
    """The text, without a character that is cut off at the end; "" if it is not so encoded."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeError:
        return ""


def _decode_error(path: Path, encoding: str) -> UserError:
    """Read again for the offset in the file: the decoder's own is that in a buffer."""
    strict = codecs.getincrementaldecoder(encoding)()
    lenient = codecs.getincrementaldecoder(encoding)(errors="replace")
    done, line, beyond_ascii, rest = 0, 1, 0, b""
    with _open_bytes(path) as raw:
        while not rest:
            chunk = raw.read(CHUNK)
            good = len(chunk)
            try:
                strict.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:  # its buffer ends where the chunk ends
                rest = error.object[error.start :]
                good = max(0, len(chunk) - len(rest))
                row = error.object[error.object.rfind(b"\n", 0, error.start) + 1 :]
                row += raw.read(CHUNK)
            text = lenient.decode(chunk[:good])
            line += text.count("\n")
            beyond_ascii += 0 if text.isascii() else sum(map("\x7f".__lt__, text))
            done += len(chunk)
            if not chunk and not rest:
                return UserError(f"{path}: changed while it was read")
    where = f"{path}:{line}: byte {done - len(rest)} (0x{rest[0]:02X}) is not {encoding}"
    if beyond_ascii >= 10 and _codec(encoding).startswith("utf-8"):
        return UserError(f"{where}, but those before it are: is the file damaged, or a mixture?")
    likely = guess_encoding(row)
    if likely and _codec(likely) != _codec(encoding):
        return UserError(f"{where}; it looks like {likely}: pass --encoding {likely}")
    return UserError(f"{where}; pass its own with --encoding (gb18030, big5, utf-16, latin-1, ...)")


def _first_byte(encoding: str, last: int) -> Callable[[str], bool]:
    """Whether a character is one of the frequent ones, with which the encoding's table begins."""
    return lambda character: 0 < (character.encode(encoding, "ignore") or b"\0")[0] <= last


LIKELY: tuple[tuple[str, Callable[[str], bool], float, float, float], ...] = (
    # encoding; the characters beyond ASCII that its texts are made of; their least share of
    # those; the least and the largest share of characters beyond ASCII in the whole text
    ("utf-8", bool, 0, 0, 1),
    ("cp932", lambda c: "\u3041" <= c <= "\u3096", 0.2, 0, 1),
    ("euc_jp", lambda c: "\u3041" <= c <= "\u3096", 0.2, 0, 1),
    ("cp949", lambda c: "\uac00" <= c <= "\ud7a3", 0.9, 0, 1),
    ("gb18030", _first_byte("gb2312", 0xD7), 0.9, 0, 1),
    ("big5", _first_byte("big5", 0xC6), 0.9, 0, 1),
    ("cp1251", lambda c: "\u0430" <= c <= "\u044f", 0.7, 0.3, 1),
    ("koi8-r", lambda c: "\u0430" <= c <= "\u044f", 0.7, 0.3, 1),
    ("cp1252", lambda c: c.isalpha() or c in "‘’“”–—…€£°«»•§©®™¿¡", 0.9, 0, 0.3),
)


def guess_encoding(data: bytes) -> str | None:
    """A likely encoding for `data`, which starts at a character, or None: a hint, never used."""
    if b"\0" in data:  # the right byte order of utf-16 is the one that shows tabs and ASCII words
        orders = ("utf-16-le", "utf-16-be")
        return max(orders, key=lambda n: sum("\t" <= c <= "~" for c in data.decode(n, "replace")))
    for encoding, belongs, least, fewest, most in LIKELY:
        text = _decode(data, encoding)
        beyond = [character for character in text if character > "\x7f"]
        share = len(beyond) / max(1, sum(not character.isspace() for character in text))
        if text and sum(map(belongs, beyond)) >= least * len(beyond) and fewest <= share <= most:
            return encoding
    return None
