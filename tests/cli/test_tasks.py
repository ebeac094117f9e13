"""What is measured of a folder of Hugging Face."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fakequant.cli.commands import app
from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.errors import RecipeError
from fakequant.report import read_results
from tests.support.vision import import_torchvision

import_torchvision()
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = [f"w{n}" for n in range(100)]
LINES = [" ".join(WORDS[(7 * line + 3 * n) % 99 + 1] for n in range(20)) for line in range(40)]
ROWS = [(LINES[at], ("bad", "good")[at % 2]) for at in range(10)]


def folder_of(path: Path, kind: str) -> Path:
    """A small model and its tokenizer, and lines of text beside them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=100, id2label={0: "bad", 1: "good"}, **shape)
    if kind == "LlamaForCausalLM":
        config = transformers.LlamaConfig(vocab_size=100, **shape)
    getattr(transformers, kind)(config).save_pretrained(path / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(path / "model")
    (path / "lines.txt").write_text("\n".join(LINES))
    (path / "rows.csv").write_text("text,label\n" + "\n".join(f'"{text}", {label}' for text, label in ROWS))
    return path / "model"


def loaded(folder: Path, task: str) -> Recipe:
    return load_recipe(folder, folder.parent / "lines.txt", task=task)


CAUSAL, LABELS, ENCODER = "LlamaForCausalLM", "BertForSequenceClassification", "BertModel"


def test_perplexity_is_that_of_the_windows(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CAUSAL)
    found = loaded(folder, "auto")
    assert found.task.label == "perplexity"
    assert found.task.on == "3 windows of 256 tokens of lines.txt, which also calibrated"
    model = found.model()
    tokens = torch.tensor([int(word[1:]) for word in " ".join(LINES).split()])[:768].view(3, 256)
    with torch.no_grad():
        own = sum(model(input_ids=one[None], labels=one[None]).loss.item() for one in tokens) / 3
    assert found.evaluate(model) == pytest.approx(-math.exp(own), rel=1e-6)
    (tmp_path / "more.txt").write_text("\n".join(LINES * 10))
    by_more = load_recipe(folder, tmp_path / "more.txt", task="auto").task.on
    assert by_more == "11 windows of 256 tokens of more.txt, after the lines for calibration"


@pytest.mark.parametrize("form", ["csv", "names", "numbers"])
def test_accuracy_counts_the_right_labels(tmp_path: Path, form: str) -> None:
    folder, file = folder_of(tmp_path, LABELS), tmp_path / "rows.csv"
    if form != "csv":
        file = tmp_path / "rows.jsonl"
        labels = [("bad", "good").index(label) if form == "numbers" else label for _, label in ROWS]
        rows = [{"label": label, "text": text} for (text, _), label in zip(ROWS, labels, strict=True)]
        file.write_text("\n".join(map(json.dumps, rows)))
    found = loaded(folder, f"accuracy={file}")
    assert (found.task.label, found.task.on) == ("accuracy, %", f"10 rows of {file.name}")
    model = found.model()
    with torch.no_grad():
        ids = torch.tensor([[int(word[1:]) for word in text.split()] for text, _ in ROWS])
        right = model(input_ids=ids).logits.argmax(1) == torch.tensor([0, 1] * 5)
    assert found.evaluate(model) == pytest.approx(100 * right.double().mean().item())


def test_cosine_is_one_for_the_model_itself_and_less_for_another(tmp_path: Path) -> None:
    found = loaded(folder_of(tmp_path, ENCODER), "auto")
    model = found.model()
    assert found.evaluate(model) == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    assert 0 < found.evaluate(model) < 0.99


def test_a_page_of_a_folder_says_how_good_it_is(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path, CAUSAL), tmp_path / "out"
    words = ["quantize", folder, "--text", tmp_path / "lines.txt", "--preset", "int8_weight_only", "--out", out]
    done = CliRunner().invoke(app, [f"{word}" for word in words])
    assert done.exit_code == 0, done.output
    data = read_results(out)
    page = (out / "report.html").read_text()
    assert data.metric == "perplexity"
    assert "Measured: perplexity on 3 windows of 256 tokens of lines.txt" in page
    assert (data.accuracy[0].format, data.accuracy[0].negated) == ("float32", True)
    assert f"float32 : {-data.accuracy[0].value:.6g}" in done.output
    assert f"{-data.accuracy[-1].value:.2f}" in page
    assert "not measured" not in page
    assert "activations calibrated" not in page  # they stay in float


def test_a_text_too_short_to_measure_is_said_on_the_page(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CAUSAL)
    (tmp_path / "lines.txt").write_text("w1 w2")
    found = loaded(folder, "auto")
    assert not found.offers("evaluate")
    assert "has 2 tokens, but perplexity is measured on windows of 256; give" in found.task.why_not


MISTAKES = {
    "unknown": (LABELS, "acuracy=rows.csv", r"unknown --task 'acuracy=rows\.csv'; did you mean accuracy\?; the tasks"),
    "auto with a file": (LABELS, "auto=rows.csv", r"unknown --task 'auto=rows\.csv'.*the tasks are perplexity=TEXT"),
    "no file": (LABELS, "accuracy=absent.csv", r"--task reads absent\.csv, but there is no such file"),
    "a folder": (LABELS, "accuracy=.", r"--task reads \., but this is a folder"),
    "empty": (LABELS, "accuracy=empty", r"--task reads empty, but the file has no line of text"),
    "no labels": (LABELS, "accuracy", r"--task accuracy needs texts with labels: --task accuracy=FILE"),
    "header alone": (LABELS, "accuracy=header", r"header has no row below its header"),
    "other columns": (LABELS, "accuracy=columns", r"row 1 of columns lacks text and label; .* this file has a, b"),
    "one column": (LABELS, "accuracy=lines.txt", r"row 1 of lines\.txt lacks text and label; a file of labels has"),
    "a row too short": (LABELS, "accuracy=short", r"row 2 of short lacks label; a file of labels has the columns"),
    "unknown label": (LABELS, "accuracy=label", r"row 1 of label has the label 'fair', .* knows 'bad', 'good', or"),
    "no JSON": (LABELS, "accuracy=json", r"line 2 of json is not JSON: .*; each line is an object"),
    "open quotes": (LABELS, "accuracy=quotes", r"quotes is not CSV: .*; give CSV with a header, or JSON lines"),
    "a model of one label": (LABELS, "accuracy=rows.csv", r"two labels or more, but this model has 1"),
    "model without labels": (CAUSAL, "accuracy=rows.csv", r"is for a model that gives labels, but .*LlamaForCausalLM"),
    "model without text": (ENCODER, "perplexity", r"is for a model that generates text, but .* --task cosine compares"),
    "a short text": (CAUSAL, "perplexity=words", r"words has 2 tokens, but perplexity is measured on windows of 256"),
}
FILES = {
    "empty": "\n", "header": "text,label\n", "columns": "a,b\n1,2\n", "short": "text,label\nw1,bad\nw2\n",
    "label": "text,label\nw1,fair\n", "json": '{"text": "w1", "label": "bad"}\nw2\n', "words": "w1 w2",
    "quotes": 'text,label\n"w1,bad\n',
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_one_line_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, task, said = MISTAKES[kind]
    folder = folder_of(tmp_path, model)
    if kind == "a model of one label":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "bad"}}))
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=said) as caught:
        loaded(folder, task)
    assert "\n" not in f"{caught.value}"


def printed(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 else result.stderr).split())


def test_what_chooses_presets_measures_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CAUSAL)
    given = (folder, "--text", tmp_path / "lines.txt", "-q")
    presets = ("--preset", "int8_weight_only", "--preset", "int4_group32")
    found = printed("advise", *given, *presets, "--floor", 1000)
    assert "INT4_GROUP32 is the smallest that meets the floor of 1000.0 perplexity: it has 9" in found
    assert "Measured: perplexity on 3 windows of 256 tokens of lines.txt" in found
    assert "None meets the floor of 20.0 perplexity: " in printed("advise", *given, *presets[2:], "--floor", 20)
    found = printed("compare", *given, *presets[:2], "--improve", "none")
    assert found.split()[:4] == ["preset", "method", "steps", "perplexity"]
    assert float(found.split()[found.split().index("mse") + 2]) > 0
    assert "perplexity gives 9" in printed("search", *given, *presets, "--floor", 1000)
    refused = printed("search", *given, *presets, "--floor", 20, code=1)
    assert "the floor 20: the largest mix, 9.00 bits per weight, has the metric 9" in refused


def test_a_command_keeps_the_task(tmp_path: Path) -> None:
    folder, rows = folder_of(tmp_path, LABELS), tmp_path / "rows.csv"
    given = (folder, "--text", tmp_path / "lines.txt", "--task", f"accuracy={rows}", "-q")
    found = printed("advise", *given, "--preset", "int8_weight_only")
    assert "accuracy: it has " in found
    assert "--out quantized --preset int8_weight_only" in found
    assert found.endswith(f"--task accuracy={rows}")
    unmeasured = printed("advise", *given[:3], "--task", "none", "-q", "--preset", "int8_weight_only")
    assert "dB" in unmeasured
    assert "--task auto" not in unmeasured
    refused = printed("search", *given, "--bits", 9, code=1)
    assert "is the measure of --floor, which is missing" in refused
    refused = printed("search", *given[:3], "--task", "none", "--floor", 9, code=1)
    assert refused == "error: --floor needs a measure. --task none was given; --task auto measures the model."


def test_a_task_is_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--task is for a folder of Hugging Face, but .*small\.py is not one"):
        load_recipe(tmp_path / "small.py", task="accuracy=rows.csv")
