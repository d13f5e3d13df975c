// Reads tests/testdata/op_oracles.json (tests/oracles/make_op_oracles.py).
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

namespace treadle {

inline nlohmann::json ReadOpOracles() {
  std::ifstream file(TREADLE_TESTDATA "/op_oracles.json");
  return nlohmann::json::parse(file);
}

inline std::vector<float> Floats(const nlohmann::json& values) {
  return values.get<std::vector<float>>();
}

}  // namespace treadle
