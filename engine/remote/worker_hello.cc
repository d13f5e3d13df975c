#include "engine/remote/worker_hello.h"

#include <algorithm>

#include "engine/remote/control.pb.h"
#include "engine/remote/machine.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

void DescribeWorker(const WorkerOptions& options, const std::string& machine,
                    control::WorkerHello& out) {
  out.set_protocol(kControlProtocol);
  out.set_version(options.version);
  out.set_model_path(options.model_path);
  out.set_memory_available(AvailableMemory());
  out.set_machine(machine);
  out.set_cpus(UsableCpus());
  out.set_compute(options.compute);
  out.set_device(options.device);
  out.set_dtype(options.dtype);
  out.set_deterministic(options.deterministic);
  const RankGpus& gpus = options.ranks.gpus;
  out.set_gpus(static_cast<int32_t>(gpus.gpus.size()));
  out.set_no_gpu(gpus.none);
  if (gpus.gpus.empty()) return;
  out.set_gpu_memory(std::ranges::min(gpus.gpus, {}, &RankGpus::Gpu::memory_bytes).memory_bytes);
}

}  // namespace treadle
