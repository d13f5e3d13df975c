// A build without XGrammar refuses constraints.
#include "base/status.h"
#include "server/constraint/constraint_compiler.h"

namespace treadle {
namespace {

class NoCompiler final : public ConstraintCompiler {
 public:
  void ReadAhead(std::function<void()>) override {}
  bool Works() const override { return false; }
  bool Keeps(const Constraint&) override { return true; }
  absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(const Constraint&) override {
    return InvalidArgument(
        "is not supported by this server, which was built without XGrammar (TREADLE_XGRAMMAR)");
  }
};

}  // namespace

std::unique_ptr<ConstraintCompiler> ConstraintCompiler::Create(const Tokenizer&, int32_t,
                                                               const std::vector<int32_t>&) {
  return std::make_unique<NoCompiler>();
}

}  // namespace treadle
