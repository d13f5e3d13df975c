// The contract of kernels/cuda/runtime/device.h on a GPU.
#include "tests/kernels/cuda/runtime/device_contract.h"
