"""`fakequant improve-folder`: a folder of Hugging Face is quantized a block at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.cli.huggingface import folder_functions
from fakequant.integrations import gguf_tokenizer
from fakequant.streaming import choosing, improve_folder
from tests.support.language_models import llama

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["improve-folder", *(str(word) for word in words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    llama().save_pretrained(found)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(200)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(found)
    lines = [" ".join(f"w{(7 * line + 3 * n) % 199 + 1}" for n in range(20 + line)) for line in range(12)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    return found


def words_for(folder: Path, out: str) -> list[Any]:
    text = folder.parent / "lines.txt"
    return [folder, "--out", folder.parent / out, "--text", text, "--preset", "int4_group32", "--float", "lm_head"]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_are_those_of_the_function(folder: Path) -> None:
    done = invoke(*words_for(folder, "out"))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("[1/1] choosing weights a block at a time ...")
    written = f"{folder.parent / 'out'}"
    said = " ".join(done.output.split())
    assert f" Written: {written}. Read it: fakequant.read({written!r})" in said
    assert "nothing was chosen for 1 of 15: model.embed_tokens (nearest: it runs before the blocks)" in said
    batches = [*folder_functions(folder, folder.parent / "lines.txt")["calibration_batches"]()]
    config = fq.presets.INT4_GROUP32.with_rule(fq.Rule("lm_head"))
    improve_folder(folder, folder.parent / "own", config, batches, mask="attention_mask")
    assert bytes_of(folder.parent / "out") == bytes_of(folder.parent / "own")
    assert "lm_head.weight" in dict(fq.read(folder.parent / "out").named_parameters())


def test_a_file_is_named_and_warnings_have_no_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    words = [*words_for(folder, "out"), "--format", "gguf", "--preset", "gguf_q8_0"]
    refused = invoke(*words)
    assert "cannot hold this model, however it is quantized: the tokenizer is a 'WordLevel'; files" in refused.output
    assert not (folder.parent / "out").exists()
    monkeypatch.setattr(gguf_tokenizer, "_tokenizer_of", lambda _: None)
    with warnings.catch_warnings(action="always"):
        done = invoke(*words)
    assert f" Written: {folder.parent / 'out' / 'model.gguf'}. Read it:" in " ".join(done.output.split())
    assert "\nwarning: the file has no tokenizer" in done.output
    assert ".py:" not in done.output


def test_it_goes_on_after_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(*words_for(folder, "whole")).exit_code == 0
    own, calls = choosing.improved, list[None]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(choosing, "improved", interrupted)
    done = invoke(*words_for(folder, "out"))
    assert (done.exit_code, len(calls)) == (130, 2)
    assert "goes on with the first block that is not finished" in done.output
    assert "\n1 of 2 blocks are finished by an earlier call\n" in invoke(*words_for(folder, "out")).output
    assert len(calls) == 4  # the second block and the table of tokens; the first block was finished
    assert bytes_of(folder.parent / "out") == bytes_of(folder.parent / "whole")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["--preset", "int5"], "unknown preset"),
        (["--steps", "slow"], "unknown steps 'slow'"),
        (["--format", "safetensor"], "unknown format"),
        (["--text", "nothing.txt"], "there is no nothing.txt"),
        (["--text", "FOLDER"], "model is a folder; give a file with lines of text by --text"),
        (["--out", "FOLDER"], "is the source, too"),
    ],
)
def test_mistakes_are_one_line(folder: Path, change: list[Any], text: str) -> None:
    words = [*words_for(folder, "out"), *(folder if word == "FOLDER" else word for word in change)]
    done = invoke(*words)
    assert done.exit_code == 1
    assert text in done.output
    assert done.output.splitlines()[-1].startswith("error: ")
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("content", ["", "\n \n\t\n"], ids=["empty", "blank"])
def test_a_text_without_lines_is_named(folder: Path, content: str) -> None:
    text = folder.parent / "none.txt"
    text.write_text(content)
    done = invoke(folder, "--out", folder.parent / "out", "--text", text)
    assert done.exit_code == 1
    assert f"{folder} needs text for calibration, and {text} has no line; give a file with lines" in done.output


def test_what_is_wrong_with_a_tokenizer_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        done = invoke(*words_for(folder, "out"))
        assert done.exit_code == 1
        return done.output

    def raises(error: Exception) -> None:
        def read(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)

    raises(ValueError("\nNo files.\nMore."))
    end = "ValueError: No files.; write it there by the tokenizer's save_pretrained\n"
    assert said() == f"error: transformers cannot read the tokenizer in {folder}: {end}"
    error = ModuleNotFoundError("Could not import module 'LlamaConfig'")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    raises(error)
    assert "RuntimeError: operator torchvision::nms does not exist; install what is missing, or versions" in said()
    raises(ValueError("pass trust_remote_code=True"))
    assert "do not run; call fakequant.improve_folder with batches of your own\n" in said()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    done = invoke(tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert done.output.startswith(f"error: {tmp_path} has no config.json; give a folder that save_pretrained of")
