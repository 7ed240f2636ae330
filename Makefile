# The commands of README.md. Everything they install comes from Debian's and PyPI's packages
# (tools/setup.sh); everything they build lies under build/<preset>.
PRESET ?= release
JOBS   ?= $(shell nproc)
BUILD   = build/$(PRESET)

.PHONY: demo test bench interop fuzz build setup newest ccache-check clean format check-format tidy

configure = cmake --preset $(PRESET) --log-level=WARNING
compile   = cmake --build --preset $(PRESET) -j $(JOBS) --target

demo: setup
	@$(configure) >/dev/null
	@$(compile) train_gpt
	@$(BUILD)/examples/train_gpt --demo --ranks 2 --out out/demo

# The libraries and all that a test runs; not the benchmarks.
test: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON -DTESSERA_BUILD_BENCH=ON >/dev/null
	@$(compile) tessera_all tessera_tests
	@JOBS=$(JOBS) tools/run_tests.sh $(PRESET)

# Against Python's wrappers, side by side; see docs/benchmarks.md. BENCH=--quick takes a quarter of an hour.
BENCH ?=
bench: setup
	@$(configure) -DTESSERA_BUILD_BENCH=ON >/dev/null
	@$(compile) train_step
	@bench/compare/setup.sh
	@tools/python.sh bench/compare/compare.py --build $(BUILD) $(BENCH)

# What Python writes we read, and the other way round. Sets up .deps/python the first time.
interop: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON >/dev/null
	@$(compile) interop_program
	@tools/python.sh tests/interop/interop_test.py $(BUILD)/tests/interop/interop_program

# The readers of checkpoints against damaged and hostile input, for a minute.
FUZZ_SECONDS ?= 60
fuzz: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON >/dev/null
	@$(compile) fuzz_readers
	@$(BUILD)/tests/checkpoint/fuzz/run $(FUZZ_SECONDS)

build: setup
	@$(configure) >/dev/null
	@$(compile) tessera_all

setup:
	@tools/setup.sh

# Against the newest libtorch as well: compiles, and trains to the same losses.
newest:
	@tools/newest_torch.sh

# Does a clean build in another clone get its objects from ccache?
ccache-check: setup
	@tools/ccache_check.sh

format:
	@tools/format.sh

check-format:
	@tools/format.sh --check

tidy: setup
	@tools/tidy.sh

clean:
	@rm -rf build
