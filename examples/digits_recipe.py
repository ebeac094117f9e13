"""A recipe for `fakequant quantize`: the demo's network on scikit-learn's handwritten digits.

fakequant quantize examples/digits_recipe.py --preset int4 --out digits-int4
"""

from collections.abc import Iterator

from demo import digits
from torch import Tensor, nn

from fakequant.model.training import qat
from fakequant.model.training.fuse import fuse_batch_norm

EPOCHS = 20
training, held_out = digits.load_digits()


def model() -> nn.Module:
    """A float network without batch normalisations; a real recipe would load trained weights here."""
    return fuse_batch_norm(digits.train(training, EPOCHS), training.images[:2])


def calibration_batches() -> Iterator[Tensor]:
    """Training images, so that the held-out ones stay unseen."""
    yield from training.images.split(128)


def evaluate(net: nn.Module) -> float:
    """Held-out digits that are read rightly, in percent."""
    return digits.percent_right(net, held_out)


def train(net: nn.Module) -> None:
    """A tenth of the float training, from a hundredth of its learning rate."""
    schedule = qat.Schedule(digits.LEARNING_RATE, EPOCHS)
    qat.finetune(net, digits.AugmentedBatches(training), digits.loss, schedule)
