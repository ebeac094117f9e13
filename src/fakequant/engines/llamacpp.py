"""llama.cpp: language models on CPUs and laptops, from GGUF."""

from fakequant.model.engine import Engine, register_engine

_TYPES = "Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"

register_engine(
    Engine(
        "llama.cpp",
        "run on a CPU",
        serves="language models on CPUs and laptops",
        kinds=(tuple(f"GGUF_{name}" for name in _TYPES),),
        files="gguf",
        packages=("llama_cpp_python",),
        page="llamacpp",
        others="GGUF_",
    )
)
