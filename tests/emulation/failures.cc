// Messages about a kernel that broke a rule.
#include <string>
#include <string_view>

#include "base/status.h"
#include "tests/emulation/machine.h"

namespace treadle::simt {
namespace {

std::string_view Name(Meeting meeting) {
  static constexpr std::string_view kNames[] = {"its end",         "AwaitEarlierLaunches",
                                                "SyncThreads",     "SyncWarpgroup",
                                                "SyncWarp",        "Shuffle",
                                                "ShuffleXor",      "ShuffleUp",
                                                "Ballot",          "MmaBf16",
                                                "MmaF16",          "MmaS8",
                                                "LoadMatrix4",     "LoadMatrix4Transposed",
                                                "WarpgroupFence",  "WarpgroupMma",
                                                "WarpgroupCommit", "WarpgroupWait"};
  return kNames[static_cast<int>(meeting)];
}

}  // namespace

void KernelFailed(const std::source_location& where, const char* what) {
  const std::string text =
      Str("emulated kernel, block (", t_here.block[0], ", ", t_here.block[1], ", ", t_here.block[2],
          "), thread ", t_here.thread, " in ", where.function_name(), ": ", what);
  CheckFailed(where.file_name(), static_cast<int>(where.line()), text.c_str());
}

void LanesDiverged(const Stopped& first, int lane, const Stopped& other) {
  const bool ended = first.meeting == Meeting::kReturn;
  const std::string at =
      ended ? "" : Str(" (", first.where.file_name(), ":", first.where.line(), ")");
  const std::string what =
      Str("lanes of one warp are at different operations: lane 0 at ", Name(first.meeting), at,
          ", lane ", lane, " at ", Name(other.meeting));
  KernelFailed(other.meeting == Meeting::kReturn ? first.where : other.where, what.c_str());
}

}  // namespace treadle::simt
