// Vendor libraries that are opened when they are first needed: cuBLASLt and NCCL are hundreds of
// megabytes, and a binary that computes on the CPU, or a machine without them, should not pay.
//
// Thread safety: any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/status.h"

namespace treadle::cuda {

// Opens `name` (libcublasLt.so.13) where the loader finds it, or in the toolkit that this build was
// made with; it stays open. FailedPrecondition says where it was looked for.
absl::StatusOr<void*> OpenLibrary(const std::string& name);

// The function `name` of it. FailedPrecondition if the library has none.
absl::StatusOr<void*> FindFunction(void* library, const char* name);

// For a list of functions X(...): the members of a `library`, which keep the functions' names and
// types, and how each is found in what was `opened`.
#define TREADLE_LIBRARY_MEMBER(name) decltype(&::name) name = nullptr;
#define TREADLE_LIBRARY_FIND(name)                                                             \
  {                                                                                            \
    TREADLE_ASSIGN_OR_RETURN(void* const found, ::treadle::cuda::FindFunction(opened, #name)); \
    library.name = reinterpret_cast<decltype(&::name)>(found);                                 \
  }

}  // namespace treadle::cuda
