// The contract of kernels/cuda/runtime/device.h on a GPU.
#include "tests/kernels/cuda/device_contract.h"
