// treadle-bench: benchmarks for who works on Treadle itself; those of a model or a server on some
// machine are treadle bench's.
#include "bench/cli/benchmarks.h"
#include "server/cli/command.h"

namespace treadle {
namespace {

constexpr Command kBenchmarks[] = {
    {"kernels", "each op on real shapes, beside the machine's ceilings", BenchKernels},
    {"scheduler", "scheduling and bookkeeping, with an engine that does nothing", BenchScheduler},
    {"load", "the load client alone, against a server that only echoes", BenchLoad},
    {"accuracy", "KL divergence of compute modes and weight formats from exact", BenchAccuracy},
    {"int8", "ways to quantize to 8 bits (LLM.int8(), Table 2.1)", BenchInt8},
};

}  // namespace
}  // namespace treadle

int main(int argc, char** argv) {
  return treadle::RunBenchmark("treadle-bench", treadle::kBenchmarks, argc, argv);
}
