#include "kernels/cuda/runtime/shared_library.h"

#include <dlfcn.h>

#include "base/status.h"

namespace treadle::cuda {

absl::StatusOr<void*> OpenLibrary(const std::string& name) {
  const std::string toolkit = TREADLE_CUDA_LIBRARIES;
  for (const std::string& path : {name, toolkit + "/" + name}) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return absl::FailedPreconditionError(
      Str(name, " is neither where the loader looks (LD_LIBRARY_PATH) nor in ", toolkit));
}

absl::StatusOr<void*> FindFunction(void* library, const char* name) {
  if (void* function = dlsym(library, name)) return function;
  return absl::FailedPreconditionError(
      Str("a CUDA library has no function ", name, ": it is of another version than this build's"));
}

}  // namespace treadle::cuda
