"""LiteRT, which computes on int8 what XNNPACK computes, and divides by scales."""

from dataclasses import replace

from fakequant.engines import executorch
from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.sites.targets import Target


def placement() -> Target:
    """Where LiteRT wants quantizers."""
    return replace(executorch.placement(), name="litert")


register_engine(
    Engine(
        "litert",
        "at most a step an operator, run on a CPU",
        serves="Android, networks of convolutions",
        kinds=(STATIC,),
        packages=("ai-edge-litert",),
        placement=placement,
        aliases=("tflite",),
        page="litert",
    )
)
