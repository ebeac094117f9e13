"""The demo: it writes what it says, its files agree with the models, and held-out images choose nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fakequant as fq
from examples import demo
from examples.demo import digits
from examples.demo.codes import by_codes, compare
from fakequant.errors import OutputError, RecipeError
from fakequant.nn import QuantizedLayer
from tests.support.processor import needs_exact_sums

METHODS = {"entropy", "max", "moving_average", "mse", "percentile"}


def run_quickly(out: Path) -> dict[str, Any]:
    return demo.run(out, epochs=2, console=Console(quiet=True))


def network() -> digits.Net:
    """The network of the demo, untrained; its batch normalisations are folded."""
    return fq.fuse_batch_norm(digits.Net().eval())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "VERSIONS", 1)  # of 10, which are a third of the time
        yield out, run_quickly(out)


def test_everything_is_written(done: tuple[Path, dict[str, Any]]) -> None:
    out, results = done
    names = {path.name for path in out.iterdir()}
    models = {"int8.onnx", "int4.onnx", "int8-checkpoint", "int4-checkpoint"}
    assert names == models | {"report.html", "results.json"}
    assert json.loads((out / "results.json").read_text()) == results


def test_results_have_the_documented_keys(done: tuple[Path, dict[str, Any]]) -> None:
    _, results = done
    assert set(results) == {"accuracy", "percent", "exported_method", "models", "environment", "by_codes", "seconds"}
    tuned = {f"int{bits}_{state}" for bits in (2, 4) for state in ("calibrated", "improved", "finetuned")}
    assert set(results["percent"]) == {"float32", "int8_best", "int8_exported", "int8_by_codes", "fp8"} | tuned
    keys = {"file", "bytes", "elements", "differing", "exact", "export", "verification"}
    assert {name: set(model) for name, model in results["models"].items()} == {"int8": keys, "int4": keys}
    assert results["percent"]["int8_best"] == max(
        row["percent"] for row in results["accuracy"] if row["format"] == "INT8"
    )


def test_every_calibrator_is_measured(done: tuple[Path, dict[str, Any]]) -> None:
    rows = [(row["format"], row["method"]) for row in done[1]["accuracy"]]
    assert rows[0] == ("float32", "")
    assert {method for format, method in rows if format == "INT8"} == METHODS
    assert done[1]["exported_method"] in METHODS


def test_two_epochs_already_read_most_digits(done: tuple[Path, dict[str, Any]]) -> None:
    assert done[1]["percent"]["float32"] > 80
    assert done[1]["percent"]["int8_best"] > 80


@needs_exact_sums()
def test_integer_products_read_every_image_alike(done: tuple[Path, dict[str, Any]]) -> None:
    out, results = done
    found = results["by_codes"]
    assert found["images"] == 599
    assert found["differing"] == found["ties"]
    assert found["largest_difference"] < 0.05
    _, held_out = digits.load_digits()
    model = fq.load(network(), out / "int8-checkpoint")
    coded, again = by_codes(model, held_out.images)
    products = [layer for layer in coded.modules() if isinstance(layer, QuantizedLayer) and layer.product is not None]
    assert len(products) == 5
    assert all(layer.why_simulated() is None for layer in products)
    assert (again.differing, again.images) == (found["differing"], 599)
    assert digits.percent_right(coded, digits.in_versions(held_out)) == pytest.approx(
        results["percent"]["int8_by_codes"], abs=1e-9
    )


def test_a_digit_read_otherwise_is_a_tie_only_if_its_logits_are() -> None:
    simulated = torch.tensor([[5.0, 1.0, 0.0], [2.0, 2.00001, 0.0], [2.0, 2.1, 0.0]])
    found = torch.tensor([[5.0, 1.0, 0.0], [2.00001, 2.0, 0.0], [2.1, 2.0, 0.0]])
    compared = compare(simulated, found)
    assert (compared.images, compared.differing, compared.ties) == (3, 2, 1)
    assert compared.largest_difference == pytest.approx(0.02, rel=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_exported_models_compute_what_torch_does(done: tuple[Path, dict[str, Any]], name: str) -> None:
    model = done[1]["models"][name]
    assert model["exact"]
    assert model["differing"] == 0
    assert model["elements"] > 100_000
    assert model["bytes"] == (done[0] / model["file"]).stat().st_size


def test_checkpoints_restore_the_measured_models(done: tuple[Path, dict[str, Any]]) -> None:
    out, results = done
    _, held_out = digits.load_digits()
    for name, key in (("int8", "int8_exported"), ("int4", "int4_finetuned")):
        model = fq.load(network(), out / f"{name}-checkpoint")
        found = digits.percent_right(model, digits.in_versions(held_out))
        assert found == pytest.approx(results["percent"][key], abs=1e-9)


def test_a_margin_counts_images_and_not_their_versions() -> None:
    wanted = torch.ones(digits.VERSIONS * 100, dtype=torch.bool)
    found = wanted.clone().view(digits.VERSIONS, 100)
    found[:, :10] = False
    changes = [-1.0] * 10 + [0.0] * 90
    assert digits.margin(found.flatten(), wanted) == pytest.approx(196 * statistics.stdev(changes) / 10)
    assert digits.margin(wanted, wanted) == 0


def test_two_bits_are_won_back_without_training(done: tuple[Path, dict[str, Any]]) -> None:
    percent = done[1]["percent"]
    assert percent["int2_improved"] > percent["int2_calibrated"] + 10


def test_report_has_every_section(done: tuple[Path, dict[str, Any]]) -> None:
    page = (done[0] / "report.html").read_text()
    assert "Missing:" not in page
    assert page.count("Exact: 0 of") == 2
    assert "batch_norm" not in page
    assert "ready to be deployed" in page


@pytest.mark.exhaustive  # trains once more
def test_held_out_images_choose_nothing(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other held-out images all models are the same, bit for bit."""
    training, held_out = digits.load_digits()
    noise = digits.Split(torch.rand_like(held_out.images), held_out.digits.flip(0))
    monkeypatch.setattr(demo, "load_digits", lambda: (training, noise))
    results = run_quickly(tmp_path)
    assert results["percent"]["float32"] < 50
    assert results["exported_method"] == done[1]["exported_method"]
    for name in ("int8.onnx", "int4.onnx"):
        assert (tmp_path / name).read_bytes() == (done[0] / name).read_bytes()


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with digits.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_split_is_stratified_and_the_same_every_time() -> None:
    training, held_out = digits.load_digits()
    assert (len(training.digits), len(held_out.digits)) == (1198, 599)
    assert training.images.shape[1:] == (1, 8, 8)
    assert (training.images.min().item(), training.images.max().item()) == (0.0, 1.0)
    share = torch.bincount(held_out.digits) / (torch.bincount(held_out.digits) + torch.bincount(training.digits))
    assert (share - 1 / 3).abs().max() < 0.01
    assert torch.equal(digits.load_digits()[1].images, held_out.images)


def test_augmented_batches_cover_the_split_in_a_new_order_each_epoch() -> None:
    training, _ = digits.load_digits()
    batches = digits.AugmentedBatches(training)
    epochs = [torch.cat([labels for _, labels in batches]) for _ in range(2)]
    assert len(batches) == len(list(batches))
    assert not torch.equal(*epochs)
    for labels in epochs:
        assert torch.equal(labels.sort().values, training.digits.sort().values)
    again = digits.AugmentedBatches(training)
    assert torch.equal(epochs[0], torch.cat([labels for _, labels in again]))


def test_an_unwritable_folder_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained first"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to"):
        demo.run(tmp_path / "file", console=Console(quiet=True))


def test_without_scikit_learn_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install fakequant\[demo\]"):
        digits.load_digits()
