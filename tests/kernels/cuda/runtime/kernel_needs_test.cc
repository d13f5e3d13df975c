// Needs of the compiled kernels from a multiprocessor (threads, shared memory, registers,
// barriers), and how many of their blocks fit on it, for each kind of GPU that packages have code
// for.
//
// Threads and shared memory are those of the launches of all op cases, and of products and
// attention in the shapes of real models, on an emulated device that runs nothing. Registers,
// barriers and spills are ptxas's words (scripts/ptxas_report.sh), which lie beside the objects of
// the build. Blocks are counted by cuda_occupancy.h. TREADLE_KERNEL_TABLE=FILE writes the table.
#include <cxxabi.h>
#include <gtest/gtest.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "tests/emulation/emulated_device.h"
#if defined(TREADLE_PTXAS_REPORTS)
#include <cuda_occupancy.h>
#endif

namespace treadle::cuda {
namespace {

#if defined(TREADLE_PTXAS_REPORTS)

// A kind of GPU, and whose code it runs.
struct Gpu {
  int capability = 0;
  const char* code = nullptr;
  int multiprocessors = 0;
  int threads = 0;         // of a multiprocessor
  int shared_kib = 0;      // of a multiprocessor; a block may have 1 KiB less
  bool exact_code = true;  // false: the driver makes its own, of which this is an estimate
};
constexpr Gpu kGpus[] = {{80, "sm_80", 108, 2048, 164},   {86, "sm_80", 84, 1536, 100},
                         {89, "sm_89", 58, 1536, 100},    {90, "sm_90a", 132, 2048, 228},
                         {100, "sm_100", 148, 2048, 228}, {120, "sm_100", 170, 1536, 100, false}};

// -- launches -------------------------------------------------------------------------------------

std::string Demangled(const std::string& symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  const std::string name = status == 0 ? text : symbol;
  std::free(text);
  return name;
}

// Names of functions of this program, by address. Functions that the linker made one have several.
std::multimap<uintptr_t, std::string> Functions() {
  uintptr_t base = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<uintptr_t*>(data) = info->dlpi_addr;
        return 1;  // the program is the first
      },
      &base);
  std::multimap<uintptr_t, std::string> functions;
  FILE* nm = popen(Str("nm --defined-only /proc/", getpid(), "/exe").c_str(), "r");
  if (nm == nullptr) return functions;
  char line[4096];
  while (fgets(line, sizeof(line), nm) != nullptr) {
    unsigned long long address = 0;
    char kind = 0;
    char symbol[4000];
    if (std::sscanf(line, "%llx %c %3999s", &address, &kind, symbol) != 3) continue;
    const std::string name = symbol;
    if (name.find("Kernel") == std::string::npos) continue;
    functions.emplace(base + static_cast<uintptr_t>(address), Demangled(name));
  }
  pclose(nm);
  return functions;
}

// One sequence that decodes, or one with a chunk of a prompt, for every kind of kernel there is.
void LaunchAttention(Device& device) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const int64_t head_dim : {32, 64, 96, 128, 256}) {
      for (const int32_t rows : {1, 300}) {
        for (const bool deterministic : {false, true}) {
          const KvView kv = {.layout = {1, head_dim, 64, 8, type, KeyOrder::kByPosition}};
          const DeviceBatch batch = {
              .rows = rows, .num_sequences = 1, .max_context = 300, .max_sequence_rows = rows};
          const Tensor q = DenseTensor(nullptr, DType::kF32, rows, 4 * head_dim);
          Attention(device, q, kv, batch, 1.0f, deterministic, {}, q);
        }
      }
    }
  }
}

// Products as layers of models have them.
void LaunchProducts(Backend& backend) {
  constexpr int64_t kColumns = 1024;
  for (const char* format : {"bf16", "f16", "int8", "nf4", "q4_0", "q4_k", "q6_k", "fp8"}) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(format), 256, kColumns, 1);
    const auto packed = backend.Pack(matrix.source).value();
    for (const int64_t rows : {1, 2, 8, 16, 32, 64, 200, 2048}) {
      const Buffer x =
          backend.Allocate(static_cast<size_t>(rows * kColumns) * sizeof(float)).value();
      const Buffer out = backend.Allocate(static_cast<size_t>(rows * 256) * sizeof(float)).value();
      const Projection projection = {.weight = packed.get(),
                                     .out = DenseTensor(out.data(), DType::kF32, rows, 256)};
      backend.MatMul(DenseTensor(x.data(), DType::kF32, rows, kColumns), {&projection, 1});
    }
  }
}

// The largest launch of each kernel on that GPU, by name.
std::map<std::string, LaunchShape> LaunchesOn(const Gpu& gpu) {
  std::vector<LaunchRecord> launches;
  const ScopedEmulation emulation(
      {.multiprocessors = gpu.multiprocessors,
       .warpgroup_matrices = gpu.capability == 90,
       .shared_bytes_per_block = static_cast<size_t>(gpu.shared_kib - 1) << 10,
       .dry = true,
       .launches = &launches});
  LaunchAttention(*Device::Open(0).value());
  for (const auto& [dtype, deterministic] :
       {std::pair(DType::kF32, false), std::pair(DType::kF16, false), std::pair(DType::kBF16, true),
        std::pair(DType::kBF16, false)}) {
    const auto backend =
        MakeCudaBackend(Device::Open(0).value(), {.dtype = dtype, .deterministic = deterministic})
            .value();
    LaunchProducts(*backend);
    for (const OpCase& c : OpCases()) {
      if (deterministic) break;  // products are what it changes
      if ((c.kv.latent_dim > 0 || c.groups > 1) && !HasLatents(*backend)) continue;
      if (c.slow || c.rows * c.cols > 1 << 16 || !HasKvType(*backend, c.kv.dtype)) continue;
      Prepare(c, *backend, 1)->Run();
    }
    EXPECT_TRUE(backend->Synchronize().ok());
  }
  static const auto& functions = *new std::multimap<uintptr_t, std::string>(Functions());
  std::map<std::string, LaunchShape> largest;
  for (const LaunchRecord& launch : launches) {
    const auto [begin, end] = functions.equal_range(reinterpret_cast<uintptr_t>(launch.kernel));
    EXPECT_NE(begin, end) << "a kernel without a name";
    for (auto it = begin; it != end; ++it) {
      LaunchShape& shape = largest[it->second];
      shape.threads = std::max(shape.threads, launch.shape.threads);
      shape.shared_bytes = std::max(shape.shared_bytes, launch.shape.shared_bytes);
    }
  }
  return largest;
}

// -- what ptxas says ------------------------------------------------------------------------------

struct Compiled {
  int registers = 0;
  int barriers = 0;
  int spilled = 0;  // bytes
};
// By code ("sm_89") and kernel.
using Reports = std::map<std::pair<std::string, std::string>, Compiled>;

Reports ReadReports() {
  const std::regex entry("Compiling entry function '([^']+)' for '([^']+)'");
  const std::regex spill("([0-9]+) bytes spill stores");
  const std::regex used("Used ([0-9]+) registers(, used ([0-9]+) barriers)?");
  Reports reports;
  for (const auto& file : std::filesystem::recursive_directory_iterator(TREADLE_PTXAS_REPORTS)) {
    if (file.path().extension() != ".ptxas") continue;
    std::ifstream in(file.path());
    Compiled* kernel = nullptr;
    std::smatch found;
    for (std::string line; std::getline(in, line);) {
      if (std::regex_search(line, found, entry)) {
        kernel = &reports[{found[2], Demangled(found[1])}];
      } else if (kernel != nullptr && std::regex_search(line, found, spill)) {
        kernel->spilled = std::stoi(found[1]);
      } else if (kernel != nullptr && std::regex_search(line, found, used)) {
        kernel->registers = std::stoi(found[1]);
        kernel->barriers = found[3].matched ? std::stoi(found[3]) : 0;
      }
    }
  }
  return reports;
}

int BlocksOn(const Gpu& gpu, const LaunchShape& shape, const Compiled& kernel, int barriers) {
  cudaOccDeviceProp device;
  device.computeMajor = gpu.capability / 10;
  device.computeMinor = gpu.capability % 10;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = gpu.threads;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 << 10;
  device.sharedMemPerMultiprocessor = static_cast<size_t>(gpu.shared_kib) << 10;
  device.sharedMemPerBlockOptin = device.sharedMemPerMultiprocessor - 1024;
  device.reservedSharedMemPerBlock = 1024;
  device.numSms = gpu.multiprocessors;
  cudaOccFuncAttributes function;
  function.maxThreadsPerBlock = static_cast<int>(shape.threads);
  function.numRegs = kernel.registers;
  function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  function.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
  function.numBlockBarriers = barriers;
  const cudaOccDeviceState state;
  cudaOccResult result;
  const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(
      &result, &device, &function, &state, static_cast<int>(shape.threads), shape.shared_bytes);
  return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : 0;
}

// "AttentionKernel<bf16, 128, PromptTile<bf16, 128, 1, true>>"
std::string ShortName(std::string name) {
  for (const auto& [from, to] :
       {std::pair("\\(treadle::DType\\)1\\b", "f16"), std::pair("\\(treadle::DType\\)2\\b", "bf16"),
        std::pair("\\(treadle::DType\\)0\\b", "f32"),
        std::pair("treadle::|cuda::|low_bit::|\\(anonymous namespace\\)::|^void ", ""),
        std::pair("\\([A-Za-z0-9]+\\)$", ""), std::pair(" >", ">")}) {
    name = std::regex_replace(name, std::regex(from), to);
  }
  return name;
}

// Bytes of registers that a kernel may spill. Heads of 256 features want more than the 255
// registers there are, kernels for few rows more than two or three blocks leave each (FewResident).
int MostSpilled(const std::string& name) {
  const bool wants_more = name.find("256, PromptTile") != std::string::npos ||
                          name.find("FewRowsKernel") != std::string::npos;
  return wants_more ? 256 : 32;
}

TEST(KernelNeeds, FitEveryGpu) {
  const Reports reports = ReadReports();
  std::set<std::string> codes;
  for (const auto& [key, kernel] : reports) codes.insert(key.first);
  ASSERT_FALSE(codes.empty()) << "no reports of ptxas in " << TREADLE_PTXAS_REPORTS;
  std::map<std::string, std::map<int, std::string>> table;  // by kernel and GPU
  int gpus = 0;
  for (const Gpu& gpu : kGpus) {
    if (!codes.contains(gpu.code)) continue;
    ++gpus;
    for (const auto& [name, shape] : LaunchesOn(gpu)) {
      SCOPED_TRACE(Str(name, " on ", gpu.capability));
      const auto report = reports.find({gpu.code, name});
      ASSERT_NE(report, reports.end()) << "nvcc has compiled no such kernel";
      const Compiled& kernel = report->second;
      const int blocks = BlocksOn(gpu, shape, kernel, kernel.barriers);
      EXPECT_GE(blocks, 1);
      // Their bound is never the number of barriers (ptxas reserves all for a variable one).
      EXPECT_EQ(blocks, BlocksOn(gpu, shape, kernel, 1)) << kernel.barriers << " barriers";
      const std::string short_name = ShortName(name);
      EXPECT_LE(kernel.spilled, MostSpilled(short_name)) << "bytes spilled";
      table[short_name][gpu.capability] = Str(
          shape.threads, " x ", kernel.registers, ", ", shape.shared_bytes, ", ", kernel.barriers,
          kernel.spilled > 0 ? Str(", spills ", kernel.spilled) : "", ": **", blocks, "**");
    }
  }
  std::printf("%zu kernels on %d kinds of GPUs\n", table.size(), gpus);
  const char* path = std::getenv("TREADLE_KERNEL_TABLE");
  if (path == nullptr) return;
  std::ofstream out(path);
  out << "| Kernel |";
  for (const Gpu& gpu : kGpus) {
    out << " " << gpu.capability / 10 << "." << gpu.capability % 10
        << (gpu.exact_code ? "" : ", about") << " |";
  }
  out << "\n|---|";
  for (size_t i = 0; i < std::size(kGpus); ++i) out << "---|";
  for (const auto& [name, cells] : table) {
    out << "\n| `" << name << "` |";
    for (const Gpu& gpu : kGpus) {
      const auto cell = cells.find(gpu.capability);
      out << " " << (cell == cells.end() ? "" : cell->second) << " |";
    }
  }
  out << "\n";
}

#else

TEST(KernelNeeds, FitEveryGpu) {
  GTEST_SKIP() << "this build has no nvcc (TREADLE_CUDA), so there are no compiled kernels";
}

#endif

}  // namespace
}  // namespace treadle::cuda
