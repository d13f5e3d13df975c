// The NCCL communicator on GPUs.
#include "tests/kernels/cuda/nccl_contract.h"

namespace treadle {
namespace {

int CountRanks(std::string* why) {
  LoadKernelsEagerly();
  return cuda::Device::Count(why);
}
int OrdinalOf(int rank) { return rank; }

TEST_F(NcclCommunicatorTest, AnAllReduceInAGraph) {
  Run(ranks(), {}, [size = ranks()](Rank& self) {
    constexpr int kCount = 1000;
    float* const in =
        self.Numbers(std::vector<float>(kCount, 1.0f + static_cast<float>(self.rank)));
    float* const out = self.Numbers(std::vector<float>(kCount, 0.0f));
    self.device->BeginCapture();
    EXPECT_TRUE(self.communicator->AllReduce(in, kCount, /*accumulate=*/true, out).ok());
    auto graph = self.device->EndCapture();
    ASSERT_TRUE(graph.ok()) << graph.status();
    for (int i = 0; i < 3; ++i) self.device->Replay(**graph);
    EXPECT_TRUE(self.device->Synchronize().ok());
    const auto sum = static_cast<float>(3 * size * (size + 1) / 2);
    EXPECT_EQ(self.Read(out, kCount), std::vector<float>(kCount, sum));
    graph->reset();  // before the communicator
  });
}

}  // namespace
}  // namespace treadle
