"""Find, open and decode data files. An encoding is suggested, but never guessed."""

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import lzma
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from encodings.aliases import aliases
from itertools import chain
from pathlib import Path
from typing import Any

from training.settings.errors import UserError, did_you_mean

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", *JSON_SUFFIXES)
ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
RECENT_NS = 10 * 10**9  # a change within this time may leave size and times of a file as they were
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def expand_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Files for paths and globs (`**` too), each glob sorted. Errors: FileNotFoundError."""
    files = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"{pattern} is a folder; name its files, for example '{path}/*.csv'")
        names = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        matches = [Path(name) for name in names if not Path(name).is_dir()]
        if not matches:
            hint = did_you_mean(path.name, (other.name for other in path.parent.glob("*")))
            raise FileNotFoundError(f"no file {str(pattern)!r}{hint}")
        files += matches
    return files


def file_hash(path: Path, cache: Path | None) -> str:
    """The SHA-256 of a file's content, remembered in `cache` for as long as the file is the same by
    path, size, times and inode. One that has changed in the last seconds is always read."""
    from training.distributed.shared_folder import build_once, content_key  # imports PyTorch

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    about = path.stat()
    times = about.st_mtime_ns, about.st_ctime_ns  # only the second tells of `cp -p` or `touch -r`
    if cache and time.time_ns() - max(times) > RECENT_NS:
        key = content_key(str(path.resolve()), about.st_size, times, about.st_ino)
        with suppress(OSError):  # a cache that cannot be written
            folder = build_once(
                cache / "hashes" / key,
                lambda folder: folder.joinpath("sha256").write_text(compute(), "utf-8"),
                f"the hash of {path}",
            )
            if known := (folder / "sha256").read_text("utf-8"):
                return known
    return compute()


def format_of(path: Path) -> str:
    """The suffix that says how to read a file, without that of the compression."""
    compressed = path.suffix.lower() in COMPRESSED
    suffix = (path.with_suffix("") if compressed else path).suffix.lower()
    if suffix in TEXT_SUFFIXES or (suffix in ARROW_SUFFIXES and not compressed):
        return suffix
    text, compressions, arrow = map(" ".join, (TEXT_SUFFIXES, COMPRESSED, ARROW_SUFFIXES))
    supported = f"{text}, each also with {compressions} after it, and {arrow}"
    raise UserError(f"{path}: unknown kind of file; supported are {supported}")


def _open_bytes(path: Path) -> Any:
    return COMPRESSED.get(path.suffix.lower(), open)(path, "rb")


@contextmanager
def open_lines(path: Path, encoding: str) -> Iterator[Iterator[str]]:
    r"""Decoded lines of a text file, without its mark. Each ends at "\n" only, and keeps it."""
    try:
        with _open_bytes(path) as raw:
            _check_head(raw.read(1 << 16), path, encoding)
            raw.seek(0)
            text = io.TextIOWrapper(raw, encoding, newline="\n")
            first = text.readline().removeprefix("\ufeff")
            yield chain([first] if first else [], text)
    except UnicodeDecodeError:
        raise _decode_error(path, encoding) from None
    except (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: broken or unreadable: {reason}") from None


def check_first_line(path: Path, line: int, text: str) -> None:
    """Errors: UserError for the first line of a table that only Excel understands."""
    if match := re.fullmatch("sep=(.)", text, re.IGNORECASE):
        advice = f"remove it, and give --delimiter {match[1]!r}"
        raise UserError(f"{path}:{line}: {text!r} is a line for Excel: {advice}")


def _codec(encoding: str) -> str:
    """Python's name of an encoding. Errors: UserError for one that text files cannot have."""
    try:
        "".encode(encoding)  # refuses what is not for text, such as base64
        return codecs.lookup(encoding).name.removesuffix("-sig")
    except (LookupError, ValueError):
        hint = did_you_mean(encoding, aliases.values()) or ", try gb18030 or latin-1"
        raise UserError(f"--encoding {encoding!r} is not known{hint}") from None


def _check_head(head: bytes, path: Path, encoding: str) -> None:
    """Refuse what would decode to something wrong without an error."""
    codec, text = _codec(encoding), _decode(head, "utf-8")
    if b"\r" in head[:-1] and b"\n" not in head and format_of(path) != ".txt":
        raise UserError(
            f"{path}: lines end in a lone carriage return, as on old Macs: convert them to new "
            "lines"
        )
    fewer_nuls, more_nuls = sorted((head[:64:2].count(0), head[1:64:2].count(0)))
    has_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    fitting = [codec]
    if has_mark or (fewer_nuls == 0 and more_nuls * 4 >= len(head[:64]) > 4):
        fitting = [guess_encoding(head) or "utf-16-le", "utf-16", "utf-32"]
    elif text and "\0" not in text:
        non_ascii = sum(character > "\x7f" for character in text)
        is_utf8 = text[0] == "\ufeff" or non_ascii >= 10  # ten are not there by chance
        if is_utf8 or codec.startswith(("utf-16", "utf-32")):
            fitting = ["utf-8"]
    if codec not in fitting:
        raise UserError(f"{path}: this is not {encoding}: pass --encoding {fitting[0]}")


def _decode(data: bytes, encoding: str) -> str:
    """The text, without a character that is cut off at the end; "" if `data` is not so encoded."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeError:
        return ""


def _decode_error(path: Path, encoding: str) -> UserError:
    """Read the file again for the place of the wrong byte: a decoder only knows its buffer."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, line, non_ascii_lines = 0, 1, 0
    try:
        with _open_bytes(path) as raw:
            for chunk in chain(raw, [b""]):
                offset += len(chunk)
                text = decoder.decode(chunk, final=not chunk)
                line += text.count("\n")
                non_ascii_lines += not text.isascii()
        return UserError(f"{path}: changed while it was read")
    except UnicodeDecodeError as error:  # its buffer ends where the chunk ends
        buffer, start = error.object, error.start
        line += buffer[:start].decode(error.encoding, "ignore").count("\n")
    except UnicodeError as error:  # of codecs for other things than text, such as punycode
        return UserError(f"{path}: {error}")
    likely = guess_encoding(buffer)
    if non_ascii_lines >= 3 and _codec(encoding) == "utf-8":
        advice = ", but the lines before it are: is the file damaged?"
    elif likely and _codec(likely) != _codec(encoding):
        advice = f"; it looks like {likely}: pass --encoding {likely}"
    else:
        advice = "; pass its own with --encoding (gb18030, big5, utf-16, latin-1, ...)"
    byte = f"byte {offset - len(buffer) + start} (0x{buffer[start]:02X})"
    return UserError(f"{path}:{line}: {byte} is not {encoding}{advice}")


# Usual characters beyond ASCII have a first byte, in a character set, in a range. Encoding, set,
# range; least share of the usual among all beyond ASCII; largest share of these in a text.
USUAL_CHARACTERS = (
    ("utf-8", "utf-8", 0xC2, 0xF4, 1, 1),
    ("cp932", "cp932", 0x82, 0x83, 0.2, 1),  # kana
    ("euc_jp", "euc_jp", 0xA4, 0xA5, 0.2, 1),
    ("cp949", "euc_kr", 0xB0, 0xC8, 0.9, 1),  # syllables
    ("gb18030", "gb2312", 0xA1, 0xD7, 0.9, 1),  # frequent characters, and punctuation
    ("big5", "big5", 0xA1, 0xC6, 0.9, 1),
    ("cp1252", "cp1252", 0x80, 0xFF, 0.9, 0.3),
    ("cp1251", "cp1251", 0xE0, 0xFF, 0.7, 1),  # small letters
    ("koi8-r", "koi8-r", 0xC0, 0xDF, 0.7, 1),
)


def guess_encoding(data: bytes) -> str | None:
    """A likely encoding for `data`, which starts at a character, or None: a hint, never used."""
    if b"\0" in data:  # the right byte order of utf-16 is the one that shows tabs and ASCII words
        orders = ("utf-16-le", "utf-16-be")
        return max(orders, key=lambda n: sum("\t" <= c <= "~" for c in data.decode(n, "replace")))
    for encoding, charset, low, high, min_usual, max_non_ascii in USUAL_CHARACTERS:
        text = _decode(data, encoding)
        non_ascii = [character for character in text if character > "\x7f"]
        usual = sum(low <= (c.encode(charset, "ignore") or b"\0")[0] <= high for c in non_ascii)
        mostly_usual = usual >= min_usual * len(non_ascii)
        if text and mostly_usual and len(non_ascii) <= max_non_ascii * len(text):
            return encoding
    return None
