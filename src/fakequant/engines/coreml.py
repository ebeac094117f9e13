"""Core ML for iOS 18 and macOS 15: weights of 4 and 8 bits, per channel or in groups."""

from fakequant.model.engine import STATIC, WEIGHTS, Engine, register_engine

register_engine(
    Engine(
        "coreml",
        "not run, as it computes on a Mac alone; 0 elements of weights differ",
        serves="iPhones and Macs",
        kinds=(WEIGHTS, STATIC),
        export="export_coreml",
        packages=("coremltools",),
        page="coreml",
    )
)
