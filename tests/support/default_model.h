// The default model's file: ${TREADLE_MODEL}, as `make test` sets it, or its place in the user's
// cache.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace treadle {

inline std::string DefaultModelPath() {
  if (const char* path = std::getenv("TREADLE_MODEL")) return path;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::string folder = cache != nullptr ? cache : std::string(home ? home : "") + "/.cache";
  return folder + "/treadle/SmolLM2-135M-Instruct.Q4_1.gguf";
}

// Names its path `model`; skips the test if there is no such file.
#define NEEDS_DEFAULT_MODEL(model)                         \
  const std::string model = ::treadle::DefaultModelPath(); \
  if (!std::filesystem::exists(model))                     \
  GTEST_SKIP() << "no model file at " << model << " (make test fetches it)"

}  // namespace treadle
