// Vendor libraries that are opened when they are first needed: cuBLASLt and NCCL are hundreds of
// megabytes, and a binary that computes on the CPU, or a machine without them, should not pay.
//
// Thread safety: any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace treadle::cuda {

// Opens `name` (libcublasLt.so.13) where the loader finds it, or in the toolkit that this build was
// made with; it stays open. FailedPrecondition says where it was looked for.
absl::StatusOr<void*> OpenLibrary(const std::string& name);

// The function `name` of it. FailedPrecondition if the library has none.
absl::StatusOr<void*> FindFunction(void* library, const char* name);

}  // namespace treadle::cuda
