// How the GPU of the op cases behaves where it is emulated (cuda_backend_test.cc runs on real ones,
// too): inputs arrive late, so that a kernel which reads them before it waits for what is before it
// gets something else.
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {
namespace {

const ScopedEmulation g_settings({.deferred = true, .late_uploads = true});

}  // namespace
}  // namespace treadle::cuda
