#include "tests/fuzz/models/checkpoint_files.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/status.h"
#include "base/utf8.h"
#include "models/checkpoints/inspect/inspect.h"
#include "tests/support/run_one_token.h"

namespace treadle {

namespace fs = std::filesystem;

ScratchFolder::ScratchFolder() {
  const fs::path memory = "/dev/shm";
  path_ = ((fs::is_directory(memory) ? memory : fs::temp_directory_path()) / "treadle-fuzz-XXXXXX");
  TREADLE_CHECK(mkdtemp(path_.data()) != nullptr);
}

ScratchFolder::~ScratchFolder() { fs::remove_all(path_); }

std::string ScratchFolder::Write(std::string_view name, std::string_view bytes) const {
  const std::string path = File(name);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TREADLE_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<std::string>& TestedModels() {
  static const std::vector<std::string> paths = [] {
    std::vector<std::string> found;
    for (const char* kind : {"models", "quantized"}) {
      for (const auto& entry : fs::directory_iterator(fs::path(TREADLE_TESTDATA) / kind)) {
        if (fs::exists(entry.path() / "model.safetensors")) found.push_back(entry.path());
      }
    }
    std::ranges::sort(found);
    return found;
  }();
  return paths;
}

void UseCheckpoint(const std::string& path) {
  const auto checkpoint = Checkpoint::Open(path);
  const auto one_line = [](const std::string& text) {
    TREADLE_CHECK(text.find('\n') == std::string::npos && Printable(text) == text);
  };
  if (!checkpoint.ok()) return one_line(std::string(checkpoint.status().message()));
  const ModelReport report = Inspect(**checkpoint);
  std::string text = ReportText(report, {}) + ReportJson(report, {});
  std::erase(text, '\n');
  one_line(text);
  if (const absl::Status ran = RunOneToken(**checkpoint); !ran.ok()) {
    one_line(std::string(ran.message()));
  }
}

}  // namespace treadle
