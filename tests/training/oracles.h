// Reads tests/testdata/training_oracles.json (tests/oracles/make_training_oracles.py).
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

namespace treadle {

inline nlohmann::json ReadTrainingOracles() {
  std::ifstream file(TREADLE_TESTDATA "/training_oracles.json");
  return nlohmann::json::parse(file);
}

inline std::vector<float> Floats(const nlohmann::json& values) {
  return values.get<std::vector<float>>();
}

}  // namespace treadle
