// Reads a file of tests/testdata that a script of tests/oracles made.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace treadle {

inline nlohmann::json ReadOracles(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(std::string(TREADLE_TESTDATA "/") + name));
}

inline std::vector<float> Floats(const nlohmann::json& values) {
  return values.get<std::vector<float>>();
}

}  // namespace treadle
