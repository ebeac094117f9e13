"""The CPU kernels, compiled where a C++ compiler is; without one the package installs and its reference serves."""

import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from os import cpu_count, environ

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import include_paths, library_paths

KERNELS = "src/fakequant/ops/cpu"

if sys.platform == "win32":
    FLAGS = ["/O2", "/std:c++20", "/fp:precise"]
else:
    # No FMA contraction and no fast-math, so that results are those of the reference. Loops vectorise because errno and
    # floating-point traps, which nobody reads, need not be kept. -Wno-attributes: clang does not know every attribute.
    FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-attributes"]
# `make sanitize`: with checks of memory or arithmetic, and a deliberate fault by which these are seen to work. At -O1,
# because -O3 with checks compiles for hours; without -fwrapv, which Python's own flags may have and by which no sum
# of integers overflows.
SANITIZER = environ.get("FAKEQUANT_SANITIZER")
CHECKS = [f"-fsanitize={SANITIZER}"] if SANITIZER else []
if SANITIZER:
    FLAGS += ["-O1", "-g1", "-w", "-fno-wrapv", "-fno-omit-frame-pointer", f"-fno-sanitize-recover={SANITIZER}"]


class BuildKernels(build_ext):
    """Compiles as many files at once as there are cores: on two, in 3.5 minutes instead of 6.5."""

    def build_extensions(self):
        if sys.platform == "win32":  # whose compiler is looked for at its first call
            return super().build_extensions()
        compile_some = self.compiler.compile
        with ThreadPoolExecutor(cpu_count()) as pool:
            self.compiler.compile = lambda sources, **options: [
                made for objects in pool.map(lambda one: compile_some([one], **options), sources) for made in objects
            ]
            super().build_extensions()


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "fakequant.ops.cpu._kernels",
            sources=sorted(glob(f"{KERNELS}/*.cpp")) + (["tests/native/fault.cpp"] if SANITIZER else []),
            depends=glob(f"{KERNELS}/*.h"),
            include_dirs=include_paths(),
            library_dirs=library_paths(),
            libraries=["torch", "torch_cpu", "c10"],
            define_macros=[
                ("TORCH_TARGET_VERSION", "0x020A000000000000"),  # the stable ABI of torch 2.10
                ("Py_LIMITED_API", "0x030A0000"),
            ],
            extra_compile_args=FLAGS + CHECKS,
            extra_link_args=CHECKS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
