"""What a job leaves while it runs, how it goes on, and what an existing folder means."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.cli.job import Job
from fakequant.cli.recipe import load_recipe
from fakequant.errors import RecipeError
from tests.support.recipes import EVALUATE, RECIPE, TRAIN
from tests.support.vision import import_torchvision

STOPPED = """
def train(net):
    train_really(net)
    raise KeyboardInterrupt
"""


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])


@pytest.fixture
def stopped(recipe, tmp_path: Path) -> tuple[Path, Path, Result]:
    """A recipe whose training was interrupted, its folder, and what was printed."""
    read = (
        'if (file := Path(__file__).with_name("bias")).exists():\n        net[0].bias.data += float(file.read_text())'
    )
    made = RECIPE.replace("    return nn", "    net = nn").replace(
        "\ndef cal", f"    {read}\n    return net\n\ndef cal"
    )
    body = made + EVALUATE + TRAIN.replace("def train", "def train_really")
    switch = 'from pathlib import Path\nif Path(__file__).with_name("stop").exists():\n' + STOPPED.replace(
        "\n", "\n    "
    )
    path = recipe(f"{body}\ntrain = train_really\n{switch}\n")
    (tmp_path / "stop").touch()
    result = invoke("quantize", path, "--out", tmp_path / "out")
    (tmp_path / "stop").unlink()
    return path, tmp_path / "out", result


def test_an_interrupted_job_leaves_a_page_and_goes_on(stopped, tmp_path: Path) -> None:
    path, out, result = stopped
    assert result.exit_code == 130
    page = out / "unfinished" / "report.html"
    assert f"{page} shows what was done, and the same command goes on from there" in result.stderr
    assert "Not finished: calibrating is done, and the file is not exported." in page.read_text()
    assert {entry.name for entry in out.iterdir()} == {"unfinished"}
    again = invoke("quantize", path, "--out", out)
    assert again.exit_code == 0, again.output
    assert f"Goes on after calibrating, from {out / 'unfinished'}; --overwrite starts anew." in again.stdout
    assert "[1/8] measuring float32: done before" in again.stdout
    assert "[2/8] calibrating: done before" in again.stdout
    assert {entry.name for entry in out.iterdir()} == {
        "checkpoint", "model.onnx", "graph.txt", "report.html", "results.json"
    }  # fmt: skip
    other = tmp_path / "whole"
    assert invoke("quantize", path, "--out", other).exit_code == 0
    one, two = (fq.load(load_recipe(path).model(), folder / "checkpoint") for folder in (out, other))
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    assert [row for row in (out / "report.html").read_text().splitlines() if "fine-tuned" in row]


@pytest.mark.parametrize("change", ["options", "recipe", "damage", "overwrite", "weights"])
def test_another_job_starts_anew(stopped, tmp_path: Path, change: str) -> None:
    path, out, _ = stopped
    options = {"options": ("--method", "max"), "overwrite": ("--overwrite",)}.get(change, ())
    if change == "recipe":
        path.write_text(path.read_text() + "# changed\n")
    if change == "weights":
        (tmp_path / "bias").write_text("0.5")
    if change == "damage":
        next((out / "unfinished" / "checkpoint").glob("*.safetensors")).write_bytes(b"")
    again = invoke("quantize", path, "--out", out, *options)
    assert again.exit_code == 0, again.output
    assert "done before" not in again.stdout
    assert not (out / "unfinished").exists()
    said = f"Starts anew: {out / 'unfinished'} is of other weights, batches or options."
    assert (said in again.stdout) == (change != "overwrite")


READS = """
import json, own_layers
from pathlib import Path
import torch
from torch import nn

VALUES = json.loads(Path(__file__).with_name("values.json").read_text())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(2, 2), VALUES["attribute"]
        nn.init.constant_(self.layer.weight, VALUES["weights"])
        self.register_buffer("shift", torch.full((2,), VALUES["buffer"]), persistent=False)

    def forward(self, x):
        return self.layer(x + self.shift) * self.gain * VALUES["constant"]

def model():
    torch.manual_seed(0)
    return Net()

def calibration_batches():
    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(10, 2) * 1.0)
    data.tensors[0][-1] += VALUES["data"]
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
"""


@pytest.mark.parametrize("name", ["weights", "attribute", "buffer", "constant", "data", "module", ""])
def test_what_a_recipe_reads_decides_whether_a_job_goes_on(recipe, tmp_path: Path, name: str) -> None:
    """The values of its files, the data, and the modules of its folder; "" for no change, of shuffled data."""
    values = {"weights": 1.0, "attribute": 1.0, "buffer": 1.0, "constant": 1.0, "data": 1.0}
    path, layers = recipe(READS), tmp_path / "own_layers.py"

    def settings() -> str:
        (tmp_path / "values.json").write_text(json.dumps(values))
        sys.modules.pop("own_layers", None)
        found = load_recipe(path)
        return Job(path, "int8", "max", tmp_path).settings(found, found.model(), found.calibration_batches())

    layers.write_text("")
    before = settings()
    if name == "module":
        layers.write_text("RATE = 2\n")
    elif name:
        values[name] = 1.5
    assert (settings() == before) == (name == "")


def test_batches_that_cannot_be_compared_start_anew(stopped, tmp_path: Path) -> None:
    path, out, _ = stopped
    whole = path.read_text()
    path.write_text(whole.replace("torch.zeros(4)", "{1}"))
    (tmp_path / "stop").touch()
    stopped_again = invoke("quantize", path, "--out", out)
    assert "cannot go on after an interrupt: its batches hold more than tensors" in stopped_again.stdout
    assert stopped_again.stderr.strip().endswith("report.html shows what was done")
    (tmp_path / "stop").unlink()
    again = invoke("quantize", path, "--out", out)
    assert again.exit_code == 0, again.output
    assert "done before" not in again.stdout


@pytest.mark.parametrize("name", ["thesis.txt", "report.html", "job.json", "checkpoint/notes.safetensors", ""])
@pytest.mark.parametrize("options", [(), ("--overwrite",)], ids=["", "overwrite"])
def test_a_folder_of_the_user_stays(recipe, tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    """The folder has the name of an unfinished job; the name "" stands for a file in its place."""
    out = tmp_path / "out"
    mine = out / "unfinished" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    result = invoke("quantize", recipe(RECIPE), "--out", out, *options)
    assert result.exit_code == 0, result.output
    assert mine.read_text() == "mine"
    assert not (out / "unfinished-2").exists()
    assert f"{out} holds unfinished; this run keeps these and adds its files" in result.stdout


def test_files_of_the_user_in_an_unfinished_job_stay(stopped, recipe, tmp_path: Path) -> None:
    path, out, _ = stopped
    mine = [out / "unfinished" / name for name in ("thesis.txt", "checkpoint/notes.txt", "checkpoint/mine.safetensors")]
    for file in mine:
        file.write_text("mine")
    again = invoke("quantize", path, "--out", out)
    assert "[2/8] calibrating: done before" in again.stdout
    assert [file.read_text() for file in mine] == ["mine"] * 3
    assert {file for file in (out / "unfinished").rglob("*") if file.is_file()} == {*mine}
    (tmp_path / "stop").touch()
    stopped_again = invoke("quantize", path, "--out", out, "--overwrite")
    assert f"{out / 'unfinished-2' / 'report.html'} shows what was done" in stopped_again.stderr
    (tmp_path / "stop").unlink()
    assert "[2/8] calibrating: done before" in invoke("quantize", path, "--out", out).stdout
    assert not (out / "unfinished-2").exists()


def test_a_folder_of_another_recipe_is_refused(recipe, stopped, tmp_path: Path) -> None:
    path, out, _ = stopped
    other = recipe(RECIPE, "other.py")
    refused = invoke("quantize", other, "--out", out)
    assert refused.exit_code == 1
    assert refused.stderr.strip() == (
        f"error: {out} holds the results of another recipe, {path}; give another folder by --out, or --overwrite to "
        "replace them"
    )
    assert invoke("quantize", path, "--out", out, "--no-train").exit_code == 0
    assert f"another recipe, {path}" in invoke("quantize", other, "--out", out).stderr
    assert invoke("quantize", other, "--out", out, "--overwrite").exit_code == 0
    assert f"another recipe, {other}" in invoke("quantize", path, "--out", out).stderr


def test_a_module_and_its_function_are_a_recipe(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_recipes").mkdir()
    recipe(RECIPE.replace("def model", "def make"), "package_of_recipes/small.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_recipe("package_of_recipes.small:make")
    assert isinstance(found.model(), torch.nn.Module)
    assert not found.offers("evaluate")
    assert invoke("search", "package_of_recipes.small:make", "--bits", "20").exit_code == 0
    with pytest.raises(RecipeError, match=r"package_of_recipes\.small defines no net; give the function"):
        load_recipe("package_of_recipes.small:net")
    with pytest.raises(RecipeError, match=r"there is no module package_of_recipes\.big; run the command in the folder"):
        load_recipe("package_of_recipes.big:net")
    with pytest.raises(RecipeError, match=r"is a folder without config\.json"):
        load_recipe("package_of_recipes")
    with pytest.raises(RecipeError, match=r"--text is for a folder of Hugging Face, but .*small\.py is not one"):
        load_recipe("package_of_recipes/small.py", tmp_path / "lines.txt")


def test_a_folder_of_hugging_face_is_a_recipe(tmp_path: Path) -> None:
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    folder, text = tmp_path / "model", tmp_path / "lines.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder)
    text.write_text("a b c\nd e f g\n\nh i j a b\n")
    found = load_recipe(folder, text)
    (batch,) = list(found.calibration_batches())
    assert {name: list(value.shape) for name, value in batch.items()} == {
        "input_ids": [3, 128], "attention_mask": [3, 128]
    }  # fmt: skip
    result = invoke("compare", folder, "--text", text, "--preset", "int8", "--improve", "none")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split()[:2] == ["INT8", "mse"]
    with pytest.raises(RecipeError, match=r"needs text for calibration, and none was given; give a file .* by --text"):
        load_recipe(folder)
    with pytest.raises(RecipeError, match="needs text for calibration, and there is no"):
        load_recipe(folder, tmp_path / "absent.txt")


ODD = [
    "", "[", "[]", "null", "{}", '{"architectures": 5}', '{"architectures": [5]}', '{"architectures": ["AutoConfig"]}',
    '{"architectures": ["logging"]}', '{"architectures": ["__version__"]}', '{"model_type": "nothing"}',
    '{"model_type": 5}', '{"model_type": "bert", "hidden_size": -1}', '{"model_type": "bert", "hidden_size": "a"}',
    '{"model_type": "bert", "num_attention_heads": 0}', '{"model_type": "bert"}', "[" * 100_000, "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("content", ODD, ids=range(len(ODD)))
def test_an_odd_folder_of_hugging_face_is_one_line(tmp_path: Path, content: str) -> None:
    import_torchvision()
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    (tmp_path / "lines.txt").write_text("a b")
    result = invoke("quantize", tmp_path, "--text", tmp_path / "lines.txt", "--out", tmp_path / "out")
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (1, 1)
    assert result.stderr.startswith(f"error: transformers cannot read the model in {tmp_path}: ")


@pytest.mark.parametrize("option", [(), ("--trust-remote-code",)], ids=["", "trusted"])
def test_code_in_a_folder_of_hugging_face_runs_if_it_is_trusted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    """Also where someone answers y to the question of transformers."""
    import_torchvision()
    pytest.importorskip("transformers")
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    values = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nraise ValueError('ran')\n")
    (tmp_path / "lines.txt").write_text("a b")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    arguments = ["quantize", folder, "--text", tmp_path / "lines.txt", "--out", tmp_path / "out", *option]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments], input="y\n" * 5)
    assert result.exit_code == 1
    assert ran.exists() == bool(option)
    said = "ValueError: ran" if option else "is computed by Python files of that folder (auto_map), which do not run"
    assert said in result.stderr
