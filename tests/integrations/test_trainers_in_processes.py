"""The callbacks of trainers in two processes with DistributedDataParallel: ranges of all data, resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fakequant as fq
from fakequant.distributed import gather
from fakequant.errors import FakeQuantError
from tests.support import ranks
from tests.support.vision import import_torchvision

pytestmark = ranks.needs_gloo

LEARNED, FIXED = fq.qat.Scales.LEARNED, fq.qat.Scales.FIXED
IDS = torch.randint(0, 20, (32, 6), generator=torch.Generator().manual_seed(0))
LABELED = [{"input_ids": row, "labels": place % 2} for place, row in enumerate(IDS)]
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
SETTINGS = [{"scales": FIXED}, {"scales": LEARNED, "teacher": "float"}]


def ranges(model: nn.Module) -> list[Tensor]:
    found = fq.nn.quantizers(model).values()
    return [params.scale.detach() for q in found if (params := q._current()).scale is not None]


def same_everywhere(values: list[Tensor]) -> bool:
    return all(map(torch.equal, *gather([value.cpu() for value in values], dist.group.WORLD)))


def of_trainer(rank: int, folder: Path) -> None:
    import_torchvision()
    import transformers

    from fakequant.integrations.transformers import QATCallback

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def run(name: str, stop: int | None = None, resume: bool | None = None, **settings: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, intermediate_size=16, initializer_range=0.5)
        model = transformers.BertForSequenceClassification(config)
        callback = QATCallback("int8", [{"input_ids": IDS[8 * rank : 8 * rank + 8]}], **settings)
        arguments = transformers.TrainingArguments(
            str(folder / name), report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True, logging_steps=1,
            max_steps=stop or 6, per_device_train_batch_size=4, learning_rate=1e-3, save_steps=3,
            lr_scheduler_type="constant",
        )  # fmt: skip
        one = transformers.Trainer(model, arguments, train_dataset=LABELED, callbacks=[callback])
        calibrated = ranges(model)
        one.train(resume_from_checkpoint=resume)
        return one, calibrated

    for number, settings in enumerate(SETTINGS):
        whole, calibrated = run(f"whole{number}", **settings)
        assert whole.args.world_size == 2
        assert same_everywhere(calibrated)
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, intermediate_size=16, initializer_range=0.5)
        alone = fq.prepare(transformers.BertForSequenceClassification(config), "int8")
        fq.calibrate(alone, [{"input_ids": IDS[:8]}, {"input_ids": IDS[8:16]}], group=False, progress=False)
        assert all(map(torch.equal, calibrated, ranges(alone)))
        assert same_everywhere([*ranges(whole.model), *whole.model.state_dict().values()])
        run(f"part{number}", stop=3, **settings)
        again, _ = run(f"part{number}", resume=True, **settings)
        logs = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, again)]
        assert logs[1] == logs[0]
        assert len(logs[0]) == 6
        assert all(map(torch.equal, again.model.state_dict().values(), whole.model.state_dict().values()))
    with pytest.raises(FakeQuantError, match=r"unknown method|the process of rank 1 failed"):
        run("error", scales=LEARNED, method="lqs" if rank else "lsq")


def of_lightning(rank: int, folder: Path) -> None:
    import_torchvision()
    import lightning.pytorch as lightning

    from fakequant.integrations.lightning import QATCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            self.losses: list[Tensor] = []

        def training_step(self, batch: Tensor) -> Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    def run(name: str, epochs: int, path: str | None = None, **settings: Any) -> Net:
        module, saved = Net(), folder / name
        callback = QATCallback("int8", [X[8 * rank : 8 * rank + 8]], **settings)
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_epochs=epochs, callbacks=[callback], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=saved,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(X, 4), ckpt_path=path, weights_only=path and False)
        trainer.save_checkpoint(saved / "last.ckpt")
        return module

    for number, settings in enumerate(SETTINGS):
        whole = run(f"all{number}", 4, **settings)
        assert dist.get_world_size() == 2
        assert same_everywhere([*ranges(whole), *whole.state_dict().values()])
        run(f"half{number}", 2, **settings)
        again = run(f"rest{number}", 4, str(folder / f"half{number}" / "last.ckpt"), **settings)
        assert all(map(torch.equal, again.losses, whole.losses[-len(again.losses) :]))
        assert len(whole.losses) == 2 * len(again.losses) == 16


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    ranks.run((of_trainer,), tmp_path)


def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    ranks.run((of_lightning,), tmp_path)
