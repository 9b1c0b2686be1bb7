"""The embedded default: what is in it, that nothing leaks, and where the model comes from."""

import ast
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from toolkit.data import demo
from toolkit.errors import UserError


@pytest.fixture(scope="module")
def splits():
    return demo.stdlib_docstrings()


def test_size_and_areas(splits):
    train, validation = splits["train"], splits["validation"]
    assert set(train.columns) == {"text", "label", "file"}
    assert 4500 < len(train) + len(validation) < 8000
    assert set(train.columns["label"]) == set(validation.columns["label"])
    assert min(Counter(train.columns["label"]).values()) > 100


def test_no_held_out_text_or_file_is_seen_in_training(splits):
    train, validation = splits["train"].columns, splits["validation"].columns
    assert not set(train["file"]) & set(validation["file"])
    texts = [text.casefold().strip(". ") for text in train["text"] + validation["text"]]
    assert len(texts) == len(set(texts))


def test_held_out_share_and_largest_file(splits):
    train, validation = splits["train"].columns, splits["validation"].columns
    total = Counter(train["label"] + validation["label"])
    held_out = Counter(validation["label"])
    for area, rows in held_out.items():
        assert 0.15 <= rows / total[area] < 0.15 + 0.08
    for (area, _), rows in Counter(zip(validation["label"], validation["file"])).items():
        assert rows <= 0.08 * total[area]


def test_texts_are_summaries_of_docstrings(splits):
    """Every text is found again by the slow way: ast.walk over the file that the row names."""
    library = Path(sysconfig.get_path("stdlib"))
    columns = splits["validation"].columns
    file = Counter(columns["file"]).most_common(1)[0][0]
    docstrings = {
        " ".join((ast.get_docstring(node) or "").split())
        for node in ast.walk(ast.parse((library / file).read_bytes()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    texts = [text for text, name in zip(columns["text"], columns["file"]) if name == file]
    assert texts
    for text in texts:
        assert any(docstring.startswith(text) for docstring in docstrings)


def test_repeatable_and_share(splits):
    half = demo.stdlib_docstrings(share=0.5)
    assert half["validation"].columns == splits["validation"].columns
    whole = Counter(splits["train"].columns["label"])
    for area, rows in Counter(half["train"].columns["label"]).items():
        assert rows == pytest.approx(whole[area] / 2, abs=1)
    assert set(half["train"].columns["text"]) < set(splits["train"].columns["text"])


def _library(folder: Path, files: dict[str, int]) -> None:
    for name, count in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "\n".join(
                f'def f{row}():\n    """Summary {row} of the file {name}.\n\n    More."""' for row in range(count)
            )
        )


def test_an_area_without_enough_to_hold_out_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(tmp_path))
    _library(tmp_path, {f"email/part{part:02}.py": 5 for part in range(20)})
    _library(tmp_path, {"turtle.py": 100, "email/test/case.py": 50})
    (tmp_path / "csv.py").write_text("def broken(:\n")
    splits = demo.stdlib_docstrings()
    assert set(splits["train"].columns["label"]) == {"email"}
    assert len(splits["validation"]) == 15
    assert len(splits["train"]) == 85  # and nothing of the test folder
    assert all(text.endswith(".py.") for text in splits["train"].columns["text"])


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="--train_file"):
        demo.stdlib_docstrings()


def test_tfidf_baseline(splits):
    train, validation = splits["train"].columns, splits["validation"].columns
    scores = demo.tfidf_baseline(train["text"], train["label"], validation["text"], validation["label"])
    assert 0.45 < scores["accuracy"] < 0.65
    assert 0.4 < scores["f1_macro"] < scores["accuracy"]


def test_demo_model_is_checked(minilm):
    assert (Path(minilm) / "config.json").is_file()


class _Spec:
    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


def test_demo_model_with_other_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: _Spec(tmp_path))
    with pytest.raises(UserError, match="missing"):
        demo.demo_model()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match="SHA-256"):
        demo.demo_model()


def test_demo_model_not_installed(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(demo, "on_hub", lambda _: True)
    assert demo.demo_model() == "sentence-transformers/all-MiniLM-L6-v2"
    monkeypatch.setattr(demo, "on_hub", lambda _: False)
    with pytest.raises(UserError, match=r"pip install -e '\.\[demo\]'.*--model_name_or_path"):
        demo.demo_model()
