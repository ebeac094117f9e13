"""transformers: Hugging Face models in Python, from compressed-tensors."""

from fakequant.model.engine import WEIGHTS, Engine, register_engine

register_engine(
    Engine(
        "transformers",
        "run on a CPU, bit for bit",
        serves="Hugging Face models in Python",
        kinds=(("W8A8_TRANSFORMERS", "FP8"), (*WEIGHTS, "NVFP4_WEIGHT_ONLY")),
        files="compressed-tensors",
        packages=("transformers", "compressed-tensors"),
        page="transformers",
    )
)
