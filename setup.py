"""The CPU kernels, compiled where a C++ compiler is; without one the package installs and its reference serves."""

import sys

from setuptools import Extension, setup
from torch.utils.cpp_extension import include_paths, library_paths

WINDOWS = sys.platform == "win32"
# Exactness: no FMA contraction, no fast-math. Speed: errno and floating-point traps are not observed.
FLAGS = (
    ["/O2", "/std:c++20"]
    if WINDOWS
    else [
        "-O3",
        "-std=c++20",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-w",
    ]
)

setup(
    ext_modules=[
        Extension(
            "fakequant.ops.cpu._kernels",
            sources=["src/fakequant/ops/cpu/kernels.cpp"],
            include_dirs=include_paths(),
            library_dirs=library_paths(),
            libraries=["torch", "torch_cpu", "c10"],
            define_macros=[
                ("TORCH_TARGET_VERSION", "0x020A000000000000"),  # the stable ABI of torch 2.10
                ("Py_LIMITED_API", "0x030A0000"),
            ],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
