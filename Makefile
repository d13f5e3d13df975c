# The two commands a newcomer needs are `make serve` and `make test`; both install what they need,
# build, fetch the default model if it is not cached, and do their job.
#
#   make serve MODEL=/path/to/model.gguf ARGS="--max-batch-size 16"
#   make serve MODEL=gemma-3-270m   one that scripts/fetch_model.sh knows by name
#   make test            unit, property and end-to-end tests
#   make asan, make tsan the same suite under a sanitizer
#   make test SUITES="models gguf_test"   only these rooms of tests/ or suites; also with asan, tsan
#   make build           only build/treadle
#   make bench           build/treadle-bench: benchmarks for who works on Treadle
#   make install         build/treadle and what belongs to it, under PREFIX (/usr/local)
#   make package         build/treadle_VERSION_ARCHITECTURE.deb
#   make fuzz TIME=60    libFuzzer on what parses bytes from outside, TIME seconds each; TARGETS="gguf requests"
#   make soak TIME=60    random load and random faults for TIME seconds; PRESET=tsan: under a sanitizer; SEED=1
#   make deploy-check    the chart, dashboards and configurations of deploy/, with real tools
#   make http-check      clients that are not ours: OpenAI's, Anthropic's, LangChain, Instructor, the agents SDK, a gateway
#                        with three replicas, JSON-Schema's test suite, and for the page a browser
#   make chart-flags     what the chart knows of the flags of serve, its README, and the page of metrics, written
#   make format          clang-format every source in place

SHELL := /bin/bash
BUILD := build
JOBS  ?= $(shell nproc)
MODEL ?=
ARGS  ?=
PREFIX ?= /usr/local
SUITES ?=
TIME ?= 60
TARGETS ?=
PRESET ?= release
SEED ?= 1
soaked = $(BUILD)$(if $(filter-out release,$(PRESET)),/$(PRESET))
sanitizers = ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 suppressions=$(CURDIR)/tests/tsan.supp"

# SUITES as targets to build, and as labels of ctest ("room/suite").
space := $() $()
targets = $(if $(SUITES),--target $(foreach suite,$(SUITES),$(if $(wildcard tests/$(suite)/CMakeLists.txt),tests/$(suite)/all,$(suite))))
labels = $(if $(SUITES),-L '(^|/)($(subst $(space),|,$(strip $(SUITES))))(/|$$)' -E '_NOT_BUILT$$')

.PHONY: serve test build bench bench-check install package packages model asan tsan asan-build tsan-build fuzz soak deploy-check http-check chart-flags format format-check clean

serve: build
	@model=$$(scripts/fetch_model.sh "$(MODEL)") || exit 1; \
	exec $(BUILD)/treadle serve --model "$$model" $(ARGS)

build: packages
	@[ -f $(BUILD)/build.ninja ] || cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target treadle

bench: packages
	@[ -f $(BUILD)/build.ninja ] || cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target treadle-bench

bench-check: build bench
	@bench/check.py $(ARGS)

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

# With code for every GPU that packages are for, where nvcc is there.
package: packages
	@scripts/install_packages.sh dpkg-dev file
	@cmake --preset release -DTREADLE_CUDA_ARCHITECTURES=all
	@cmake --build --preset release -j $(JOBS) --target treadle
	@cpack --config $(BUILD)/CPackConfig.cmake -B $(BUILD)

test: packages
	@[ -f $(BUILD)/build.ninja ] || cmake --preset release
	@cmake --build --preset release -j $(JOBS) $(targets)
	@model=$$(scripts/fetch_model.sh "$(MODEL)") || exit 1; \
	TREADLE_MODEL="$$model" ctest --test-dir $(BUILD) --output-on-failure --no-label-summary -j $(JOBS) $(labels) $(ARGS)

asan-build tsan-build: %-build: packages
	@[ -f $(BUILD)/$*/build.ninja ] || cmake --preset $*
	@cmake --build --preset $* -j $(JOBS) $(targets)

asan tsan: %: %-build
	@model=$$(scripts/fetch_model.sh "$(MODEL)") || exit 1; \
	TREADLE_MODEL="$$model" $(sanitizers) \
	ctest --test-dir $(BUILD)/$@ --output-on-failure --no-label-summary -j $(JOBS) $(labels) $(ARGS)

fuzz:
	@scripts/install_packages.sh clang-14 libclang-rt-14-dev
	@[ -f $(BUILD)/fuzz/build.ninja ] || cmake --preset fuzz
	@cmake --build --preset fuzz -j $(JOBS) --target treadle_fuzz
	@scripts/fuzz.sh $(TIME) $(TARGETS)

soak: packages
	@[ -f $(soaked)/build.ninja ] || cmake --preset $(PRESET)
	@cmake --build --preset $(PRESET) -j $(JOBS) --target soak_test
	@TREADLE_SOAK_SECONDS=$(TIME) TREADLE_SOAK_SEED=$(SEED) $(sanitizers) $(soaked)/tests/soak/soak_test

packages:
	@scripts/install_packages.sh

model:
	@scripts/fetch_model.sh

deploy-check:
	@scripts/deploy_check.sh

http-check: build
	@scripts/client_check.sh

chart-flags: packages
	@[ -f $(BUILD)/build.ninja ] || cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target server_unit_test log_binary_test
	@TREADLE_WRITE_CHART=1 $(BUILD)/tests/server/server_unit_test --gtest_brief=1 --gtest_filter='ChartFlags.*'
	@TREADLE_WRITE_CHART=1 $(BUILD)/tests/server/cli/log_binary_test --gtest_brief=1 --gtest_filter='*PageOfMetrics*'

format:
	@git ls-files '*.h' '*.cc' '*.cu' | xargs clang-format -i

format-check:
	@git ls-files '*.h' '*.cc' '*.cu' | xargs clang-format --dry-run -Werror

clean:
	rm -rf $(BUILD)
