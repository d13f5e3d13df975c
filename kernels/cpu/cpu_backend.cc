#include "kernels/cpu/cpu_backend.h"

#include <utility>

#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/matmul/weight_arena.h"
#include "kernels/cpu/ops/cpu_ops.h"

namespace treadle {
namespace {

constexpr int kMaxThreads = 1024;

class CpuBackend final : public CpuOps {
 public:
  CpuBackend(int threads, CpuIsa isa, const CpuBackendOptions& options)
      : CpuOps(threads, options.pin, options.first_cpu, isa, options.compute),
        compute_(options.compute) {}

  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return Str("cpu ", Name(isa()), ", ", pool().size(),
               pool().size() == 1 ? " thread" : " threads", ", compute ", Name(compute_),
               compute_ == ComputeMode::kAuto ? " (int16)" : "");
  }

  void BindThread() override { pool().PinCaller(); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    std::shared_ptr<uint8_t> memory = MapMemory(bytes);
    if (memory == nullptr) return ResourceExhausted("no memory for a buffer of ", bytes, " bytes");
    uint8_t* data = memory.get();
    return Buffer(data, bytes, [memory = std::move(memory)](void*) {});
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return PackMatrix(source, PackTargetOf(isa(), compute_), pool(), arena_);
  }

 private:
  const ComputeMode compute_;
  WeightArena arena_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return InvalidArgument("threads is ", options.threads, ", expected 0 to ", kMaxThreads);
  }
  if (options.first_cpu < 0) {
    return InvalidArgument("first_cpu is ", options.first_cpu, ", expected 0 or more");
  }
  CpuIsa isa;
  if (options.isa.has_value()) {
    isa = *options.isa;
    bool supported = false;
    for (const CpuIsa candidate : SupportedIsas()) supported |= candidate == isa;
    if (!supported) return InvalidArgument("this processor cannot run ", Name(isa));
  } else {
    TREADLE_ASSIGN_OR_RETURN(isa, ChooseIsa());
  }
  const int threads = options.threads > 0 ? options.threads : UsableCpus();
  return std::make_unique<CpuBackend>(threads, isa, options);
}

}  // namespace treadle
