// For cuda_device.cc: a kernel of this build.
#pragma once

namespace treadle::cuda {

const void* Probe();

}  // namespace treadle::cuda
