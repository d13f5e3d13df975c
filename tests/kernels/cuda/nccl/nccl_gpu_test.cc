// The NCCL communicator on GPUs.
#include "tests/kernels/cuda/nccl/nccl_contract.h"

namespace treadle {
namespace {

int CountRanks(std::string* why) {
  LoadKernelsEagerly();
  return cuda::Device::Count(why);
}
int OrdinalOf(int rank) { return rank; }

}  // namespace
}  // namespace treadle
