// A kernel that does nothing: whether this build has code for a device can be asked of it.
#include "kernels/cuda/runtime/probe.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

struct ProbeParams {};
TREADLE_KERNEL(32) void ProbeKernel(ProbeParams) { simt::AwaitEarlierLaunches(); }

}  // namespace

const void* Probe() { return reinterpret_cast<const void*>(&ProbeKernel); }

}  // namespace treadle::cuda
