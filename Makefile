# The commands of README.md. They install only packages of Debian and PyPI (tools/setup.sh), and build in
# build/<preset>.
PRESET ?= release
JOBS   ?= $(shell nproc)
BUILD   = build/$(PRESET)

.PHONY: demo test matrix bench bench-hosts interop interop-files interop-models interop-peers zoo finetune attack elastic-chaos slurm-check loops seeds build setup docs packages conan newest ccache-check plan-page clean format check-format compile-alone tidy figures

configure = cmake --preset $(PRESET) --log-level=WARNING
compile   = cmake --build --preset $(PRESET) -j $(JOBS) --target
timed     = @tools/times.sh step

demo:
	@tools/times.sh begin
	$(timed) "setting up" tools/setup.sh
	$(timed) configuring $(configure) >/dev/null
	$(timed) compiling $(compile) train_gpt
	$(timed) training $(BUILD)/examples/train_gpt --demo --ranks 2 --out out/demo
	@tools/times.sh report

# The libraries and everything that tests run; not the benchmarks.
test:
	@tools/times.sh begin
	$(timed) "setting up" tools/setup.sh
	$(timed) configuring $(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON -DTESSERA_BUILD_BENCH=ON >/dev/null
	$(timed) compiling $(compile) tessera_all tessera_tests
	$(timed) testing env JOBS=$(JOBS) tools/run_tests.sh $(PRESET) || { tools/times.sh report; exit 1; }
	@tools/times.sh report

# `make test` with every product of worlds, options and models: three times as long.
matrix: export TESSERA_TEST_MATRIX = full
matrix: test

# Compares with Python's wrappers; see docs/benchmarks.md. BENCH=--quick takes a quarter of an hour.
BENCH ?=
bench: setup
	@$(configure) -DTESSERA_BUILD_BENCH=ON >/dev/null
	@$(compile) train_step limits
	@bench/compare/setup.sh
	@tools/python.sh bench/compare/compare.py --build $(BUILD) $(BENCH)

# The comparison over a link of --mbit Mbit/s, between network namespaces; needs root. HOSTS="--hosts 2 --rounds 1"
# takes less.
HOSTS ?= --hosts 2 3 4 --mbit 1000 10000
bench-hosts: setup
	@[ "$$(id -u)" = 0 ] || { echo "bench-hosts: needs root, for network namespaces" >&2; exit 2; }
	@$(configure) -DTESSERA_BUILD_BENCH=ON >/dev/null
	@$(compile) train_step
	@tools/python.sh -c 'import torch'
	@bench/hosts.py --train-step $(BUILD)/bench/train_step $(HOSTS)

# Exchanges files and exported models with Python in both directions. Sets up .deps/python the first time. Most of these
# programs use one core, so two run at a time.
interop: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON >/dev/null
	@$(compile) interop_program tessera_command train_gpt exported_program finetune
	@for packages in s3 tensorboard peft; do tools/python.sh --with $$packages -c pass || exit 1; done
	@$(MAKE) --no-print-directory -j 2 --output-sync=target interop-files interop-models

interop-files:
	@tools/python.sh tests/interop/interop_test.py $(BUILD)/tests/interop/interop_program
	@tools/python.sh tests/interop/convert_test.py $(BUILD)/tests/interop/interop_program $(BUILD)/tools/tessera/tessera Convert
	@tools/python.sh tests/interop/damage_test.py
	@tools/python.sh --with s3 tests/interop/s3_test.py $(BUILD)/tests/interop/interop_program $(BUILD)/tools/tessera/tessera
	@tools/python.sh --with tensorboard tests/interop/tensorboard_test.py $(BUILD)/examples/train_gpt

interop-models:
	@tools/python.sh tests/exported/zoo.py $(BUILD)/tests/exported/exported_program --quick
	@tools/python.sh --with peft tests/exported/finetune_test.py $(BUILD)/examples/finetune
	@$(MAKE) --no-print-directory finetune FINETUNE='--stage 3 --steps 20'

# Runs tools/tessera-convert on files written by DeepSpeed and FairScale. Installs both the first time.
interop-peers: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON >/dev/null
	@$(compile) interop_program tessera_command
	@bench/compare/setup.sh
	@tools/python.sh tests/interop/convert_test.py $(BUILD)/tests/interop/interop_program $(BUILD)/tools/tessera/tessera Peers

# Exports models of transformers, torchvision, timm and others, and compares training with Python's.
zoo: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON >/dev/null
	@$(compile) exported_program
	@tools/python.sh --with zoo tests/exported/zoo.py $(BUILD)/tests/exported/exported_program

# Exports a small Llama of transformers, trains it on 2 ranks and loads it in transformers again.
FINETUNE ?= --stage 3 --steps 300
finetune: setup
	@$(configure) -DTESSERA_BUILD_EXAMPLES=ON >/dev/null
	@$(compile) finetune
	@tools/python.sh examples/finetune/finetune.py prepare out/finetune examples/data/king_james_new_testament.txt
	@$(BUILD)/examples/finetune --archive out/finetune/model.pt2 --weights out/finetune/initial \
	  --ids out/finetune/ids.safetensors --characters --prompt 'And Jesus said ' --out out/finetune $(FINETUNE)
	@tools/python.sh examples/finetune/finetune.py check out/finetune

# Attacks jobs and readers of files for MINUTES, drawn from SEED: kills, stops, cut links, faults of the disk, damaged
# files, fuzzers. Each failure is printed with the command that repeats it.
MINUTES ?= 3
attack: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON >/dev/null
	@$(compile) attack_job attack_faults fuzz_readers exported_tests
	@tests/attack/attack.py $(BUILD) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Injects FAULTS random faults into ranks of an elastic run, from seed SEED, 1 by default. A failure prints its seed.
FAULTS ?= 1000
elastic-chaos: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON >/dev/null
	@$(compile) elastic_tests
	@TESSERA_CHAOS_FAULTS=$(FAULTS) TESSERA_CHAOS_SEED=$(or $(SEED),1) $(BUILD)/tests/elastic/elastic_tests --gtest_filter='ElasticChaos.*'

# Runs the scripts of examples/slurm on a cluster of network namespaces; needs root, and Debian's slurm-wlm and munge.
slurm-check: setup
	@$(configure) -DTESSERA_BUILD_EXAMPLES=ON >/dev/null
	@$(compile) train_gpt
	@tests/tools/slurm_check.sh $(BUILD)

# Runs LOOPS random training loops by every wrapper, from seed SEED, 1 by default.
LOOPS ?= 200
loops: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON >/dev/null
	@$(compile) loops_tests
	@TESSERA_LOOP_PROGRAMS=$(LOOPS) TESSERA_LOOP_SEED=$(or $(SEED),1) $(BUILD)/tests/loops/loops_tests --gtest_brief=1 --gtest_filter='*Drawn.*'

# Runs the tests on the simulated accelerator with other delays for each seed. A failure prints its seed.
SEEDS ?= 11 12 13 14 15 16 17 18
seeds: setup
	@$(configure) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON -DTESSERA_BUILD_BENCH=ON >/dev/null
	@$(compile) tessera_tests
	@for seed in $(SEEDS); do echo "seed $$seed"; \
	  TESSERA_ACCELERATOR_SEED=$$seed ctest --preset $(PRESET) -j $(JOBS) -L accelerator --output-on-failure || exit 1; done

build: setup
	@$(configure) >/dev/null
	@$(compile) tessera_all

setup:
	@tools/setup.sh

# The API reference: build/docs/index.html.
docs:
	@tools/setup.sh docs
	@tools/docs.sh

# Makes the archive, the Debian package and Conan's from the build, and tries each with a program.
packages: build
	@tools/check_packages.sh

# `make packages`, and Conan builds its own copy of the tree: three minutes more.
conan: build
	@tools/check_packages.sh create

# Compiles with the newest libtorch, and compares losses.
newest:
	@tools/newest_torch.sh

# Tests the page of `tessera plan --html` in chromium.
plan-page: setup
	@$(configure) >/dev/null
	@$(compile) tessera_command
	@tools/check_plan_page.sh $(BUILD)

# Checks that a clean build in another clone takes its objects from ccache.
ccache-check: setup
	@tools/ccache_check.sh

format:
	@tools/format.sh

check-format:
	@tools/format.sh --check

# Compiles each source file alone, as the preset dev does: 15 minutes.
compile-alone: setup
	@tools/compile_alone.py --all

tidy: setup
	@tools/tidy.sh

# Structure, English and commit subjects in figures, with the ratchet and the goal of each.
figures:
	@tools/figures.py

clean:
	@rm -rf build
