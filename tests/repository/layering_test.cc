// Rooms and floors (CONTRIBUTING.md): reads every #include of the project and fails on an arrow
// that the table does not allow, on one that leads back from where it came, be it between rooms
// inside a room, and on a vendor header in a public header.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/architectures/architecture.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// A room's own folder and what its row adds; the longest matching folder is a file's room.
struct Room {
  std::string folder;
  std::vector<std::string> may_include;
  std::vector<std::string> must_not_include;     // outranks may_include
  std::vector<std::string> must_not_reach = {};  // nor through what it includes
};

const std::vector<Room>& Rooms() {
  static const std::vector<Room> rooms = {
      {"base", {}, {}},
      {"net", {"base/"}, {}},
      {"kernels", {"base/"}, {}},
      // Whoever compiles kernels without a GPU brings what stands in for it.
      {"kernels/cuda", {"kernels/", "base/", "emulation/"}, {}},
      {"models", {"kernels/", "base/"}, {}},
      {"models/text", {"base/"}, {}},
      {"training", {"models/", "kernels/", "base/"}, {"training/remote/"}},
      {"training/remote",
       {"training/", "engine/", "models/", "kernels/", "net/", "base/"},
       {"engine/record/"}},
      {"engine", {"models/", "kernels/", "base/"}, {"engine/remote/", "engine/record/"}},
      {"engine/remote", {"engine/", "models/", "kernels/", "net/", "base/"}, {}},
      // The language between scheduler and engine: it knows neither of them.
      {"engine/plan", {"models/", "kernels/", "base/"}, {}},
      {"engine/kv", {"engine/plan/", "models/", "kernels/", "base/"}, {}},
      {"engine/record", {"engine/", "models/", "kernels/", "base/"}, {"engine/remote/"}},
      {"scheduler",
       {"engine/", "base/"},
       {"engine/remote/", "engine/record/", "engine/stage", "engine/kv/kv_cache.h",
        "engine/local_engine.h"},
       {"models/", "kernels/"}},
      {"server",
       {"scheduler/", "engine/", "models/checkpoints/", "models/text/", "net/", "base/"},
       {"engine/remote/", "engine/record/", "server/cli/"}},
      {"server/access",
       {"server/observe/log_event.h", "server/observe/refusals.h", "net/", "base/"},
       {}},
      // Bytes of HTTP; what they mean is for others.
      {"server/http", {"net/", "base/"}, {}},
      {"server/openai",
       {"server/session/", "server/constraint/constraint.h", "server/http/", "server/access/",
        "server/observe/", "scheduler/", "models/text/", "base/"},
       {}},
      // Other APIs' words for the same calls.
      {"server/anthropic",
       {"server/openai/", "server/session/", "server/constraint/constraint.h", "server/http/",
        "scheduler/", "models/text/", "base/"},
       {}},
      {"server/responses",
       {"server/openai/", "server/session/", "server/constraint/constraint.h", "server/http/",
        "scheduler/", "models/text/", "base/"},
       {}},
      // Constraints on tokens; XGrammar stays in one source of it.
      {"server/constraint", {"scheduler/", "engine/", "models/text/", "base/"}, {}},
      // Which adapters are in memory.
      {"server/adapters", {"engine/", "models/", "base/"}, {}},
      {"server/session",
       {"server/adapters/", "server/access/", "server/constraint/", "server/durable/",
        "server/observe/", "scheduler/", "engine/", "models/text/", "base/"},
       {}},
      // Files on disk.
      {"server/durable",
       {"server/observe/log_event.h", "server/observe/refusals.h", "scheduler/", "engine/",
        "base/"},
       {}},
      {"server/cli",
       {"server/", "scheduler/", "engine/", "training/", "models/", "kernels/", "net/", "base/",
        "bench/"},
       {}},
      {"bench", {"server/", "scheduler/", "engine/", "models/", "kernels/", "net/", "base/"}, {}},
      {"bench/load",
       {"bench/", "server/", "scheduler/", "engine/", "models/", "net/", "base/"},
       {},
       {"server/cli/"}},
      // Everything that decides in service, and nothing that speaks to clients.
      {"bench/simulate",
       {"bench/load/", "scheduler/", "engine/", "models/", "kernels/", "base/"},
       {"engine/remote/", "engine/local_engine.h"},
       {"server/"}},
      {"tests",
       {"emulation/", "bench/", "server/", "scheduler/", "engine/", "training/", "models/",
        "kernels/", "net/", "base/"},
       {}},
  };
  return rooms;
}

const Room* RoomOf(const std::string& path) {
  const Room* best = nullptr;
  for (const Room& room : Rooms()) {
    if (path.starts_with(room.folder + "/") &&
        (best == nullptr || room.folder.size() > best->folder.size())) {
      best = &room;
    }
  }
  return best;
}

struct Include {
  int line = 0;
  std::string name;
  bool quoted = false;
};

std::vector<Include> ReadIncludes(const fs::path& file) {
  std::vector<Include> includes;
  std::ifstream in(file);
  std::string text;
  for (int line = 1; std::getline(in, text); ++line) {
    const size_t hash = text.find_first_not_of(" \t");
    if (hash == std::string::npos || text.compare(hash, 8, "#include") != 0) continue;
    const size_t open = text.find_first_of("\"<", hash);
    if (open == std::string::npos) continue;
    const bool quoted = text[open] == '"';
    const size_t close = text.find(quoted ? '"' : '>', open + 1);
    if (close == std::string::npos) continue;
    includes.push_back({line, text.substr(open + 1, close - open - 1), quoted});
  }
  return includes;
}

bool StartsWithAny(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const std::string& prefix) { return name.starts_with(prefix); });
}

// Empty if the arrow is allowed.
std::string Violation(const std::string& path, const Include& include) {
  static const std::vector<std::string> kVendor = {"grpcpp/", "grpc/",     "google/",     "nccl",
                                                   "cuda",    "cublas",    "prometheus/", "gloo/",
                                                   "boost/",  "xgrammar/", "dlpack/"};
  if (include.name.starts_with("boost/") && !path.starts_with("tests/")) {
    return "Boost in the product";
  }
  if (include.name.starts_with("xgrammar/") && path != "server/constraint/xgrammar_compiler.cc") {
    return "XGrammar outside of its source";
  }
  // Kernels are compiled as plain C++, too.
  if (path.ends_with(".cu") && !include.quoted && StartsWithAny(include.name, kVendor)) {
    return "a vendor header in a kernel";
  }
  // Parts that every front end shares speak no protocol.
  if (path.starts_with("server/session/") &&
      (StartsWithAny(include.name, kVendor) || include.name.ends_with(".pb.h"))) {
    return "generated protobuf or gRPC in this room";
  }
  const bool header = path.ends_with(".h");
  if (header && (StartsWithAny(include.name, kVendor) || include.name.ends_with(".pb.h")) &&
      !path.starts_with("tests/")) {
    return "a vendor header in a public header";
  }
  if (!include.quoted || include.name.ends_with(".pb.h")) {
    if (include.name.ends_with(".pb.h") &&
        !StartsWithAny(path, {"server/", "bench/", "tests/", "engine/plan/", "engine/remote/",
                              "engine/record/", "training/remote/"})) {
      return "generated protobuf in this room";
    }
    return "";
  }
  const Room* room = RoomOf(path);
  if (room == nullptr) return "a source outside every room";
  if (StartsWithAny(include.name, room->must_not_include)) return "this room must not know it";
  // Libraries of the distribution; they have no room.
  static const std::vector<std::string> kLibraries = {"absl/", "CLI/", "gtest/", "gmock/",
                                                      "nlohmann/"};
  if (include.name.starts_with(room->folder + "/") ||
      StartsWithAny(include.name, room->may_include) || StartsWithAny(include.name, kLibraries)) {
    return "";
  }
  return "no arrow from this room";
}

TEST(Layering, EveryIncludeFollowsAnArrow) {
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(TREADLE_SOURCE)) {
    const std::string path = fs::relative(entry.path(), TREADLE_SOURCE).string();
    const std::string extension = entry.path().extension().string();
    if (path.starts_with("build") || path.starts_with(".") ||
        (extension != ".h" && extension != ".cc" && extension != ".cu" && extension != ".cuh")) {
      continue;
    }
    EXPECT_NE(extension, ".cuh") << path << ": headers of kernels are .h files";
    ++files;
    for (const Include& include : ReadIncludes(entry.path())) {
      const std::string violation = Violation(path, include);
      EXPECT_TRUE(violation.empty())
          << path << ":" << include.line << ": #include " << include.name << ": " << violation;
    }
  }
  EXPECT_GT(files, 30);
}

// Sources of the product and what of it they include.
using Sources = std::map<std::string, std::vector<std::string>>;
Sources ReadSources() {
  Sources sources;
  for (const auto& entry : fs::recursive_directory_iterator(TREADLE_SOURCE)) {
    const std::string path = fs::relative(entry.path(), TREADLE_SOURCE).string();
    const Room* const room = RoomOf(path);
    const std::string extension = entry.path().extension().string();
    if (room == nullptr || room->folder == "tests") continue;
    if (extension != ".h" && extension != ".cc" && extension != ".cu") continue;
    for (const Include& include : ReadIncludes(entry.path())) {
      if (include.quoted && RoomOf(include.name) != nullptr) sources[path].push_back(include.name);
    }
  }
  return sources;
}

// Where the arrows of a graph lead, however far.
std::set<std::string> ReachOf(const Sources& arrows, const std::string& from) {
  std::set<std::string> reached;
  std::vector<std::string> next = {from};
  while (!next.empty()) {
    const auto found = arrows.find(next.back());
    next.pop_back();
    if (found == arrows.end()) continue;
    for (const std::string& to : found->second) {
      if (reached.insert(to).second) next.push_back(to);
    }
  }
  return reached;
}

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

// Arrows that lead back, to be removed; the list may only become shorter.
const std::set<std::pair<std::string, std::string>> kKnownArrowsBack = {
    {"kernels/cpu", "kernels/cpu/matmul"},  {"kernels/cpu", "kernels/cpu/ops"},
    {"kernels/cuda", "kernels/cuda/dense"}, {"kernels/cuda/runtime", "kernels/cuda"},
    {"kernels/formats", "kernels"},         {"server/grpc", "server/gateway"},
    {"server/observe", "server"},           {"server/observe", "server/access"},
    {"server/observe", "server/session"}};

// No folder includes, through any others, one that includes it.
TEST(Layering, NoArrowLeadsBack) {
  Sources folders;
  std::map<std::pair<std::string, std::string>, std::string> example;
  for (const auto& [path, includes] : ReadSources()) {
    for (const std::string& include : includes) {
      const std::pair arrow(FolderOf(path), FolderOf(include));
      if (arrow.first == arrow.second) continue;
      if (example.try_emplace(arrow, path + ": #include " + include).second &&
          !kKnownArrowsBack.contains(arrow)) {
        folders[arrow.first].push_back(arrow.second);
      }
    }
  }
  ASSERT_GT(folders.size(), 30u);
  for (const auto& [from, all] : folders) {
    for (const std::string& to : all) {
      EXPECT_FALSE(ReachOf(folders, to).contains(from)) << example.at({from, to}) << " leads back";
    }
  }
  for (const auto& arrow : kKnownArrowsBack) {
    EXPECT_TRUE(example.contains(arrow) && ReachOf(folders, arrow.second).contains(arrow.first))
        << arrow.first << " -> " << arrow.second << " leads back no longer: take it off the list";
  }
}

// Headers that rooms see through others although they must not, to be removed; likewise.
const std::set<std::pair<std::string, std::string>> kKnownReaches = {
    {"scheduler", "kernels/dtype.h"},
    {"scheduler", "kernels/kv_view.h"},
    {"scheduler", "kernels/state_layout.h"},
    {"scheduler", "kernels/sampling.h"},
    {"scheduler", "models/architectures/model_config.h"},
    {"scheduler", "models/expert_use.h"}};

TEST(Layering, NothingForbiddenIsSeenThroughOthers) {
  std::set<std::pair<std::string, std::string>> seen;
  const Sources sources = ReadSources();
  for (const auto& [path, includes] : sources) {
    const Room& room = *RoomOf(path);
    for (const std::string& header : ReachOf(sources, path)) {
      if (!StartsWithAny(header, room.must_not_include) &&
          !StartsWithAny(header, room.must_not_reach)) {
        continue;
      }
      seen.insert({room.folder, header});
      EXPECT_TRUE(kKnownReaches.contains({room.folder, header})) << path << " sees " << header;
    }
  }
  for (const auto& reach : kKnownReaches) {
    EXPECT_TRUE(seen.contains(reach))
        << reach.first << " sees " << reach.second << " no longer: take it off the list";
  }
}

TEST(Layering, TheCheckSeesWhatIsForbidden) {
  EXPECT_EQ(Violation("kernels/cpu/a.cc", {1, "kernels/tensor.h", true}), "");
  EXPECT_NE(Violation("kernels/cpu/a.cc", {1, "models/model.h", true}), "");
  EXPECT_NE(Violation("scheduler/a.cc", {1, "kernels/backend.h", true}), "");
  EXPECT_NE(Violation("scheduler/a.cc", {1, "server/grpc/inference.pb.h", true}), "");
  EXPECT_EQ(Violation("scheduler/a.cc", {1, "base/sync.h", true}), "");
  EXPECT_NE(Violation("server/a.cc", {1, "models/architectures/llama.h", true}), "");
  EXPECT_NE(Violation("server/a.h", {1, "grpcpp/grpcpp.h", false}), "");
  EXPECT_EQ(Violation("server/grpc/a.cc", {1, "server/grpc/inference.pb.h", true}), "");
  EXPECT_NE(Violation("server/session/a.cc", {1, "server/grpc/inference.pb.h", true}), "");
  EXPECT_NE(Violation("server/session/a.cc", {1, "grpcpp/grpcpp.h", false}), "");
  EXPECT_NE(Violation("server/session/a.cc", {1, "server/grpc/messages.h", true}), "");
  EXPECT_NE(Violation("server/http/a.h", {1, "boost/asio.hpp", false}), "");
  EXPECT_NE(Violation("server/openai/a.cc", {1, "boost/asio.hpp", false}), "");
  EXPECT_NE(Violation("server/http/a.cc", {1, "server/session/session.h", true}), "");
  EXPECT_NE(Violation("server/openai/a.cc", {1, "server/grpc/messages.h", true}), "");
  EXPECT_EQ(Violation("server/session/a.cc", {1, "server/access/api_keys.h", true}), "");
  EXPECT_NE(Violation("server/session/a.cc", {1, "xgrammar/xgrammar.h", false}), "");
  EXPECT_NE(Violation("kernels/cuda/a.h", {1, "cuda_runtime.h", false}), "");
  EXPECT_NE(Violation("kernels/cuda/a.cu", {1, "cuda_bf16.h", false}), "");
  EXPECT_EQ(Violation("kernels/cuda/a.cc", {1, "cuda_runtime.h", false}), "");
  EXPECT_EQ(Violation("kernels/cuda/a.cu", {1, "kernels/cuda/runtime/simt.h", true}), "");
  EXPECT_EQ(Violation("server/cli/a.cc", {1, "kernels/backend.h", true}), "");
}

// An architecture's name is for its description alone: what differs is asked of that.
TEST(Repository, NobodyComparesAnArchitecturesName) {
  // Rooms that these (and models/text) name hold a tokenizer, or an architecture as data.
  const std::vector<std::string> kOthers = {"models/checkpoints/gguf/gguf_tokenizer.cc",
                                            "models/checkpoints/write/gguf_description.cc",
                                            "models/checkpoints/random/random_shapes.h"};
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(TREADLE_SOURCE)) {
    const std::string path = fs::relative(entry.path(), TREADLE_SOURCE).string();
    const Room* const room = RoomOf(path);
    const std::string extension = entry.path().extension().string();
    if (room == nullptr || room->folder == "tests" || room->folder == "models/text" ||
        path.starts_with("models/architectures/") || (extension != ".h" && extension != ".cc") ||
        std::ranges::count(kOthers, path) > 0) {
      continue;
    }
    ++files;
    const std::string text = ReadWhole(entry.path());
    for (const Architecture& architecture : Architectures()) {
      EXPECT_EQ(text.find("\"" + std::string(architecture.name) + "\""), std::string::npos)
          << path << " names " << architecture.name;
    }
  }
  EXPECT_GT(files, 300);
}

// A link that leads out of the tree is somebody's machine, not the project.
TEST(Repository, EveryLinkStaysInTheTree) {
  const fs::path root = fs::canonical(TREADLE_SOURCE);
  for (auto entry = fs::recursive_directory_iterator(root); entry != fs::end(entry); ++entry) {
    const std::string path = fs::relative(entry->path(), root).string();
    if (path == "build" || path == ".git" || path == ".cache") entry.disable_recursion_pending();
    if (!entry->is_symlink()) continue;
    const fs::path target =
        fs::weakly_canonical(entry->path().parent_path() / fs::read_symlink(*entry));
    EXPECT_TRUE(target.string().starts_with(root.string() + "/")) << path << " leads to " << target;
  }
}

}  // namespace
}  // namespace treadle
