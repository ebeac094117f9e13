"""The example of delivered language models: it asserts itself that the engines compute what the models do."""

import pytest

from tests.support.vision import import_torchvision

pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")
import_torchvision()

from examples import language_model  # noqa: E402


@pytest.mark.filterwarnings("ignore:compressed-tensors", "ignore:the file has no tokenizer")
def test_engines_write_the_text_of_the_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(language_model, "BATCH", 2)
    language_model.main(tmp_path, steps=10)
    shown = capsys.readouterr().out
    assert shown.count("the file minus the simulation: 0.0\n    def add_argument(self") == 2
    assert ("llama.cpp: the same text" in shown) == language_model.llama_cpp.is_there()
