"""The CPU kernels, compiled where a C++ compiler is; without one the package installs and its reference serves."""

import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from os import cpu_count, environ
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import include_paths, library_paths

KERNELS = "src/fakequant/ops/cpu"

if sys.platform == "win32":
    FLAGS = ["/O2", "/std:c++20", "/fp:precise"]
else:
    # No FMA contraction and no fast-math, so that results are those of the reference. Loops vectorise because errno and
    # floating-point traps, which the kernels never read, need not be kept. -g0 takes back Python's own -g, which makes
    # compiling slower and the library several times as large.
    FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"]
    # Clang does not know every attribute, nor every warning that GCC has. GCC 12 gives 20,000 warnings about undefined
    # registers in its own header of AVX-512. No file uses all functions of convert.h and chunks.h.
    FLAGS += ["-Wno-attributes", "-Wno-maybe-uninitialized", "-Wno-unused-function", "-Wno-unknown-warning-option"]
# `make sanitize`: with checks of memory or arithmetic, and a deliberate fault by which these are seen to work. At -O1,
# because -O3 with checks compiles for hours; without -fwrapv, which Python's own flags may have and by which no sum
# of integers overflows.
SANITIZER = environ.get("FAKEQUANT_SANITIZER")
CHECKS = [f"-fsanitize={SANITIZER}"] if SANITIZER else []
# Without names of functions the library is a tenth smaller.
LINK = CHECKS or (["-Wl,--strip-all"] if sys.platform == "linux" else [])
# `make wheel`: a wheel without kernels, for every platform; the reference serves.
PURE = bool(environ.get("FAKEQUANT_PURE"))
if SANITIZER:
    FLAGS += ["-O1", "-g1", "-w", "-fno-wrapv", "-fno-omit-frame-pointer", f"-fno-sanitize-recover={SANITIZER}"]
# The files that take longest to compile come first, so that the cores finish together.
SLOWEST = ["sixteen_lanes.cpp", "eight_lanes.cpp", "chunks.cpp", "gradients.cpp", "dynamic.cpp", "kernels.cpp"]
# Their loops are vector instructions already. Compared with -O2, -O3 takes 2.5 times as long to compile them, and the
# kernels are no faster.
WRITTEN_IN_VECTORS = ["sixteen_lanes.cpp", "eight_lanes.cpp"]


def slowest_first(source):
    """The key by which sources are sorted."""
    name = Path(source).name
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST), name


def flags_of(source, flags):
    """The flags of one source."""
    at_o2 = Path(source).name in WRITTEN_IN_VECTORS and not SANITIZER
    return [*flags, "-O2"] if at_o2 else flags


class BuildKernels(build_ext):
    """Compiles as many files at once as there are cores."""

    def build_extensions(self):
        if sys.platform == "win32":  # whose compiler is looked for at its first call
            return super().build_extensions()
        compile_some = self.compiler.compile

        def compile_one(source, *, extra_postargs=(), **options):
            return compile_some([source], extra_postargs=flags_of(source, extra_postargs), **options)

        def compile_all(sources, **options):
            sources = sorted(sources, key=slowest_first)
            return [made for objects in pool.map(lambda one: compile_one(one, **options), sources) for made in objects]

        with ThreadPoolExecutor(cpu_count()) as pool:
            self.compiler.compile = compile_all
            super().build_extensions()


KERNEL_LIBRARY = Extension(
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
    extra_link_args=LINK,
    py_limited_api=True,
    optional=not environ.get("FAKEQUANT_KERNELS"),  # a release fails where they do not compile
)

setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[] if PURE else [KERNEL_LIBRARY],
    options={} if PURE else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
