"""Shared fixtures: real data where it can be had, and tiny models made on the spot."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# A shell that starts this in the background has SIGINT ignored, here and in all that is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models gain nothing from threads, and lose minutes to them where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets, or a skip where the machine has none."""
    root = os.environ.get("TOOLKIT_TEST_DATA")
    if not root or not (Path(root) / "data").is_dir():
        pytest.skip("TOOLKIT_TEST_DATA does not name a folder with real data")
    return Path(root) / "data"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The demo model's folder."""
    from toolkit.data.demo import demo_model

    return Path(demo_model())


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """A BERT of 2 layers, hidden 32, 64 positions, dropout 0, with a tokenizer trained here."""
    from tests.tiny import save_tiny_bert

    return save_tiny_bert(tmp_path_factory.mktemp("tiny_bert"))


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory) -> Path:
    """The tiny BERT with a trained-looking head for neg and pos."""
    from tests.tiny import save_tiny_classifier

    return save_tiny_classifier(tmp_path_factory.mktemp("tiny_classifier"))
