"""MLX: language models on Macs, by mlx-lm and the programs that are built on it."""

from fakequant.model.engine import Engine, register_engine

register_engine(
    Engine(
        "mlx",
        "run on a CPU: 0 weights differ, logits 121 dB; no Mac was seen",
        serves="language models on Macs",
        kinds=(("MLX_4BIT", "MLX_6BIT", "MLX_8BIT", "MLX_MXFP4", "MLX_NVFP4"),),
        files="mlx",
        packages=("mlx-lm", "mlx"),
        page="mlx",
    )
)
