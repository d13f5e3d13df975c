#include "server/observe/token_gaps.h"

namespace treadle {
namespace {

// A request that generates is in every plan, or every plan of its turn in the pipeline.
constexpr uint64_t kForgottenAfter = 1024;  // records

}  // namespace

void TokenGaps::BeginRecord() {
  if (++record_ % kForgottenAfter != 0) return;
  std::erase_if(seen_, [this](const auto& entry) {
    return entry.second.record + kForgottenAfter <= record_;
  });
}

std::optional<double> TokenGaps::Observe(const LedgerMember& member, double time) {
  const auto [seen, first] = seen_.try_emplace(member.request);
  std::optional<double> gap;
  if (!first && !member.initiation) gap = time - seen->second.time;
  seen->second = {time, record_};
  return gap;
}

}  // namespace treadle
