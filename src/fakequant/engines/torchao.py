"""torchao: tensor subclasses of PyTorch, for `torch.compile`."""

from fakequant.model.engine import WEIGHTS, Engine, register_engine

register_engine(
    Engine(
        "torchao",
        "run on a CPU",
        serves="PyTorch, `torch.compile`",
        kinds=((*WEIGHTS, "NVFP4_WEIGHT_ONLY"),),
        files="torchao",
        packages=("torchao",),
        page="torchao",
    )
)
