# The commands of README.md. Everything they install comes from Debian's and PyPI's packages
# (tools/setup.sh); everything they build lies under build/<preset>.
PRESET ?= release
JOBS   ?= $(shell nproc)
BUILD   = build/$(PRESET)

.PHONY: demo test bench interop fuzz build setup clean format tidy

demo: build
	@$(BUILD)/examples/train_gpt --demo --ranks 2 --out out/demo

test: setup
	@cmake --preset $(PRESET) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON -DTESSERA_BUILD_BENCH=ON --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS)
	@ctest --preset $(PRESET)

# Against Python's wrappers, side by side; see docs/benchmarks.md. BENCH=--quick takes a quarter of an hour.
BENCH ?=
bench: setup
	@cmake --preset $(PRESET) -DTESSERA_BUILD_BENCH=ON --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS) --target train_step
	@bench/compare/setup.sh
	@tools/python.sh bench/compare/compare.py --build $(BUILD) $(BENCH)

# What Python writes we read, and the other way round. Sets up .deps/python the first time.
interop: setup
	@cmake --preset $(PRESET) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS) --target interop_program
	@tools/python.sh tests/interop/interop_test.py $(BUILD)/tests/interop/interop_program

# The readers of checkpoints against damaged and hostile input, for a minute.
FUZZ_SECONDS ?= 60
fuzz: setup
	@cmake --preset $(PRESET) -DTESSERA_BUILD_TESTS=ON --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS) --target fuzz_readers
	@$(BUILD)/tests/checkpoint/fuzz/run $(FUZZ_SECONDS)

build: setup
	@cmake --preset $(PRESET) --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS) --target tessera_all

setup:
	@tools/setup.sh

format:
	@git ls-files '*.h' '*.cpp' | xargs clang-format -i

tidy:
	@git ls-files '*.cpp' | grep -v nccl | xargs clang-tidy -p build/release --quiet

clean:
	@rm -rf build
